"""Track which embedding rows of a TorchRec model change, publish exactly those, apply them while serving."""

from delta_tracker.predictor import Predictor
from delta_tracker.publisher import Publisher
from delta_tracker.selection import TopK
from delta_tracker.store.lookups import DeltaStore
from delta_tracker.tracker import ModelDeltaTracker
from delta_tracker.types import (
    Delta,
    DeltaRows,
    EmbdUpdateMode,
    IndexedLookup,
    Memory,
    ShardSpec,
    TableSpec,
    TrackingMode,
)

__all__ = [
    "Delta",
    "DeltaRows",
    "DeltaStore",
    "EmbdUpdateMode",
    "IndexedLookup",
    "Memory",
    "ModelDeltaTracker",
    "Predictor",
    "Publisher",
    "ShardSpec",
    "TableSpec",
    "TopK",
    "TrackingMode",
]
