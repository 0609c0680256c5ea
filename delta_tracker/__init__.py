"""Track which embedding rows of a TorchRec model change, publish exactly those, apply them while serving."""

from delta_tracker.cadence import Cadence
from delta_tracker.gate import Gate
from delta_tracker.predictor import Predictor
from delta_tracker.publisher import Publisher
from delta_tracker.row_target import RowTarget
from delta_tracker.selection import TopK
from delta_tracker.store.lookups import DeltaStore
from delta_tracker.stream.encoding import Encoding
from delta_tracker.stream.retention import Retention
from delta_tracker.stream.storage import Storage
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
    "Cadence",
    "Delta",
    "DeltaRows",
    "DeltaStore",
    "EmbdUpdateMode",
    "Encoding",
    "Gate",
    "IndexedLookup",
    "Memory",
    "ModelDeltaTracker",
    "Predictor",
    "Publisher",
    "Retention",
    "RowTarget",
    "ShardSpec",
    "Storage",
    "TableSpec",
    "TopK",
    "TrackingMode",
]
