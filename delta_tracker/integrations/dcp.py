"""Load a tracker's state from a checkpoint of ``torch.distributed.checkpoint`` (DCP), at any world size.

To save, pass the tracker itself: ``dcp.save({"model": model, "tracker": tracker}, checkpoint_id=path)``, or
``dcp.async_save``. What the ranks hold differs in size from one save to the next, and DCP wants to be told the keys and
sizes that it is to load. So the loading side looks them up in the checkpoint first.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from delta_tracker.errors import InvalidArgumentError, MalformedStateError
from delta_tracker.tracker.checkpoint.rank_header import HEADER, parse

if TYPE_CHECKING:
    from delta_tracker.tracker.tracker import ModelDeltaTracker

_KEY = re.compile(rf"(?:(?P<prefix>.*)\.)?(?P<header>{HEADER.pattern})")
_MAX_HEADER_BYTES = 1 << 28


class _Wanted(dict[str, Tensor]):
    """The tensors to load, possibly none.

    Where a rank has no shard of some table, DCP tries the way in which torch 2.3 flattened dicts, to which an empty one
    is an entry of the checkpoint. This one always looks as if it had a tensor.
    """

    def values(self) -> Any:  # noqa: ANN401  dict's own view cannot be made
        return super().values() or [torch.empty(0)]


class SavedTracker:
    """A ``Stateful`` for ``dcp.load``: the state that a tracker has in a checkpoint.

    Each rank reads the headers of all parts and then only those parts that hold rows of its shards. Call order:
    ``dcp.load`` calls :meth:`state_dict`, fills the tensors, and calls :meth:`load_state_dict`. Name it behind the
    model in the alphabet, as ``"tracker"`` is behind ``"model"``: DCP restores in that order, and the model has to be
    first.
    A header that does not fit, or a tensor that is not there, is refused on every rank before anything is loaded, the
    model included.

    Args:
        tracker: who takes it over.
        source: the checkpoint's path, or a reader of it.
        key: under which name a tracker was saved; None if there is one tracker in the checkpoint.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"model": model, "tracker": SavedTracker(tracker, path)}  # doctest: +SKIP
        >>> dcp.load(state, checkpoint_id=path)  # doctest: +SKIP
    """

    def __init__(
        self, tracker: ModelDeltaTracker, source: str | os.PathLike[str] | StorageReader, key: str | None = None
    ) -> None:
        self._tracker = tracker
        self._reader = source if isinstance(source, StorageReader) else FileSystemReader(source)
        self._key = key
        self._headers: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Empty tensors for the parts that this rank needs; nothing if the checkpoint has no tracker state.

        Raises: as :meth:`delta_tracker.tracker.tracker.ModelDeltaTracker.load_state_dict`, and

            InvalidArgumentError: if the checkpoint has trackers and ``key`` names none of them, or has several and
                there is no ``key``.
        """
        self._headers = {}
        metadata = self._reader.read_metadata()
        found: dict[str, list[str]] = {}
        for name in metadata.state_dict_metadata:
            if match := _KEY.fullmatch(name):
                found.setdefault(match["prefix"] or "", []).append(match["header"])
        if found and self._key not in found and not (self._key is None and len(found) == 1):
            raise InvalidArgumentError("key", self._key, f"Name one of the trackers in the checkpoint: {sorted(found)}")
        key = next(iter(found), "") if self._key is None else self._key
        if key not in found:
            return _Wanted()
        self._headers = self._read(metadata, key, found[key])
        parts = [parse(name, tensor) for name, tensor in self._headers.items()]
        plan = self._tracker.plan_load(parts)
        # Those of all parts: what one rank refused alone would leave the others waiting for it.
        layouts = {part.prefix + name: layout for part in parts for name, layout in part.all_layouts().items()}
        for name, (_, shape) in layouts.items():
            stored = metadata.state_dict_metadata.get(f"{key}.{name}" if key else name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != shape:
                raise MalformedStateError(name, f"the checkpoint has no tensor of shape {shape} there")
        return _Wanted({name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in plan.needs().items()})

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Let the tracker take over what was loaded.

        Raises: as :meth:`delta_tracker.tracker.tracker.ModelDeltaTracker.load_state_dict`.
        """
        self._tracker.load_state_dict({**self._headers, **state_dict})

    def _read(self, metadata: Metadata, key: str, headers: list[str]) -> dict[str, Tensor]:
        """The headers of all parts; no other rank takes part."""
        targets = {}
        for header in headers:
            name = f"{key}.{header}" if key else header
            layout = metadata.state_dict_metadata[name]
            if not isinstance(layout, TensorStorageMetadata) or layout.size.numel() > _MAX_HEADER_BYTES:
                raise MalformedStateError(name, "its header is no tensor of a reasonable size")
            targets[name] = torch.empty(layout.size, dtype=layout.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(targets, metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()
        return {header: targets[f"{key}.{header}" if key else header] for header in headers}
