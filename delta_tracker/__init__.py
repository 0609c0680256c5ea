"""Track which embedding rows of a TorchRec model change, publish exactly those, apply them while serving."""

from delta_tracker.predictor import Predictor
from delta_tracker.publisher import Publisher
from delta_tracker.tracker import ModelDeltaTracker
from delta_tracker.types import Delta, DeltaRows, ShardSpec, TableSpec, TrackingMode

__all__ = [
    "Delta",
    "DeltaRows",
    "ModelDeltaTracker",
    "Predictor",
    "Publisher",
    "ShardSpec",
    "TableSpec",
    "TrackingMode",
]
