"""Track the changed embedding rows of a TorchRec model, publish only these, and apply them to a serving model.

Each public name is imported at its first use, so that a serving host does not import the modules of a trainer.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from delta_tracker.predictor.gate import Gate as Gate
    from delta_tracker.predictor.predictor import Predictor as Predictor
    from delta_tracker.predictor.predictor import Rollout as Rollout
    from delta_tracker.predictor.served_model import ModelTarget as ModelTarget
    from delta_tracker.publisher.cadence import Cadence as Cadence
    from delta_tracker.publisher.publisher import Publisher as Publisher
    from delta_tracker.publisher.training import Recovery as Recovery
    from delta_tracker.raw_ids.index import RawIdIndex as RawIdIndex
    from delta_tracker.recovery.random_states import RandomStates as RandomStates
    from delta_tracker.recovery.restore import restore as restore
    from delta_tracker.recovery.standby import Standby as Standby
    from delta_tracker.recovery.standby import Takeover as Takeover
    from delta_tracker.row_target import RowTarget as RowTarget
    from delta_tracker.sinks.row_sink import RowSink as RowSink
    from delta_tracker.stream.format.encoding import Encoding as Encoding
    from delta_tracker.stream.maintenance.retention import Retention as Retention
    from delta_tracker.stream.maintenance.upkeep import Upkeep as Upkeep
    from delta_tracker.stream.reading.canary import Canary as Canary
    from delta_tracker.stream.storage.storage import Storage as Storage
    from delta_tracker.tracker.checkpoint.rank_counters import RankCounters as RankCounters
    from delta_tracker.tracker.data_position import DataPosition as DataPosition
    from delta_tracker.tracker.store.lookups import DeltaStore as DeltaStore
    from delta_tracker.tracker.top_k import TopK as TopK
    from delta_tracker.tracker.tracker import ModelDeltaTracker as ModelDeltaTracker
    from delta_tracker.types import Delta as Delta
    from delta_tracker.types import DeltaRows as DeltaRows
    from delta_tracker.types import EmbdUpdateMode as EmbdUpdateMode
    from delta_tracker.types import IndexedLookup as IndexedLookup
    from delta_tracker.types import Memory as Memory
    from delta_tracker.types import ShardSpec as ShardSpec
    from delta_tracker.types import TableSpec as TableSpec
    from delta_tracker.types import TrackingMode as TrackingMode

_HOMES = {
    "Cadence": "delta_tracker.publisher.cadence",
    "Canary": "delta_tracker.stream.reading.canary",
    "DataPosition": "delta_tracker.tracker.data_position",
    "Delta": "delta_tracker.types",
    "DeltaRows": "delta_tracker.types",
    "DeltaStore": "delta_tracker.tracker.store.lookups",
    "EmbdUpdateMode": "delta_tracker.types",
    "Encoding": "delta_tracker.stream.format.encoding",
    "Gate": "delta_tracker.predictor.gate",
    "IndexedLookup": "delta_tracker.types",
    "Memory": "delta_tracker.types",
    "ModelDeltaTracker": "delta_tracker.tracker.tracker",
    "ModelTarget": "delta_tracker.predictor.served_model",
    "Predictor": "delta_tracker.predictor.predictor",
    "Publisher": "delta_tracker.publisher.publisher",
    "RandomStates": "delta_tracker.recovery.random_states",
    "RankCounters": "delta_tracker.tracker.checkpoint.rank_counters",
    "RawIdIndex": "delta_tracker.raw_ids.index",
    "Recovery": "delta_tracker.publisher.training",
    "Retention": "delta_tracker.stream.maintenance.retention",
    "Rollout": "delta_tracker.predictor.predictor",
    "RowSink": "delta_tracker.sinks.row_sink",
    "RowTarget": "delta_tracker.row_target",
    "ShardSpec": "delta_tracker.types",
    "Standby": "delta_tracker.recovery.standby",
    "Storage": "delta_tracker.stream.storage.storage",
    "TableSpec": "delta_tracker.types",
    "Takeover": "delta_tracker.recovery.standby",
    "TopK": "delta_tracker.tracker.top_k",
    "TrackingMode": "delta_tracker.types",
    "Upkeep": "delta_tracker.stream.maintenance.upkeep",
    "restore": "delta_tracker.recovery.restore",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import and return the public object ``name``, or the module ``errors`` or ``monitor``, at the first access."""
    if name in ("errors", "monitor"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value: object = getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from delta_tracker.errors import MissingExtraError  # noqa: PLC0415

        raise MissingExtraError("torch", "torch") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
