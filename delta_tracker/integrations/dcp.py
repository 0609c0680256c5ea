"""Adapter that loads a tracker's state from a checkpoint of ``torch.distributed.checkpoint`` (DCP), at any world size.

To save, pass the tracker itself: ``dcp.save({"model": model, "tracker": tracker}, checkpoint_id=path)``, or
``dcp.async_save``. To load tensors, DCP needs their keys and sizes, which depend on the changed rows and the world size
of the save. :class:`SavedTracker` therefore reads the keys and sizes from the checkpoint first.
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
    """Dict of the tensors to load, by name. If the dict is empty, ``values()`` returns a placeholder tensor.

    If a rank has no shard of some table, DCP retries the load with the key flattening of torch 2.3. That flattening
    treats an empty dict as a value of the state, for which the checkpoint has no entry.
    """

    def values(self) -> Any:  # noqa: ANN401  dict's own view type cannot be constructed
        return super().values() or [torch.empty(0)]


class SavedTracker:
    """``Stateful`` object for ``dcp.load`` that loads a tracker's state from a checkpoint.

    A saved state has one part for each rank that saved it. Each rank that loads reads the headers of all parts, then
    only those parts that have rows of its shards. ``dcp.load`` calls :meth:`state_dict`, fills the tensors, and calls
    :meth:`load_state_dict`. DCP restores in alphabetical order of the keys and the model must be restored first, so use
    a key after the model's, such as ``"tracker"`` after ``"model"``. If a header is incompatible or a tensor is
    missing, every rank raises an error before any state, including the model's, is loaded.

    Args:
        tracker: tracker to load the state into.
        source: path of the checkpoint, or a storage reader for the checkpoint.
        key: key under which the tracker was saved; None if the checkpoint has one tracker.

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
        """Return uninitialized tensors by name, for ``dcp.load`` to fill with the parts that this rank needs.

        The result is empty if the checkpoint has no tracker state.

        Raises:
            InvalidArgumentError: if the checkpoint has trackers, but none under ``key``, or if ``key`` is None and the
                checkpoint has several trackers.
            UnknownFormatError: if the format version of a header is unknown.
            StateMismatchError: if the saved mode, consumers, tables or counters differ from the tracker's or between
                ranks, if the old states belong to other column ranges, or if the world size differs and a counter
                cannot be merged.
            PartialStateError: if parts are missing.
            MalformedStateError: if a header is invalid, or if a tensor that a header lists is missing or has another
                shape.
        """
        self._headers = {}
        metadata = self._reader.read_metadata()
        found: dict[str, list[str]] = {}
        for name in metadata.state_dict_metadata:
            if match := _KEY.fullmatch(name):
                found.setdefault(match["prefix"] or "", []).append(match["header"])
        if found and self._key not in found and not (self._key is None and len(found) == 1):
            raise InvalidArgumentError("key", self._key, f"Pass one of the trackers in the checkpoint: {sorted(found)}")
        key = next(iter(found), "") if self._key is None else self._key
        if key not in found:
            return _Wanted()
        self._headers = self._read(metadata, key, found[key])
        parts = [parse(name, tensor) for name, tensor in self._headers.items()]
        plan = self._tracker.plan_load(parts)
        # Check the parts of all ranks: if only one rank raised, the others would wait for it.
        layouts = {part.prefix + name: layout for part in parts for name, layout in part.all_layouts().items()}
        for name, (_, shape) in layouts.items():
            stored = metadata.state_dict_metadata.get(f"{key}.{name}" if key else name)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != shape:
                raise MalformedStateError(name, f"the checkpoint has no such tensor of shape {shape}")
        return _Wanted({name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in plan.needs().items()})

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load the tracker's state from the loaded tensors.

        Raises the errors of :meth:`delta_tracker.tracker.tracker.ModelDeltaTracker.load_state_dict`.

        Args:
            state_dict: the tensors returned by :meth:`state_dict`, filled by ``dcp.load``; empty for a checkpoint
                without tracker state.
        """
        self._tracker.load_state_dict({**self._headers, **state_dict})

    def _read(self, metadata: Metadata, key: str, headers: list[str]) -> dict[str, Tensor]:
        """Read the headers of all parts without a collective, and return the headers by name.

        Args:
            metadata: metadata of the checkpoint.
            key: key under which the tracker was saved; may be empty.
            headers: names of the headers, without the prefix ``key``.

        Raises:
            MalformedStateError: if a header is not a tensor, or is too large.
        """
        targets = {}
        for header in headers:
            name = f"{key}.{header}" if key else header
            layout = metadata.state_dict_metadata[name]
            if not isinstance(layout, TensorStorageMetadata) or layout.size.numel() > _MAX_HEADER_BYTES:
                raise MalformedStateError(name, "its header is not a tensor, or is too large")
            targets[name] = torch.empty(layout.size, dtype=layout.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(targets, metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()
        return {header: targets[f"{key}.{header}" if key else header] for header in headers}
