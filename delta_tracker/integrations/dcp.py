"""Adapters that load the states of ranks from a checkpoint of ``torch.distributed.checkpoint`` (DCP).

To save, pass the tracker or the :class:`~delta_tracker.RankCounters` itself: ``dcp.save({"model": model, "tracker":
tracker}, checkpoint_id=path)``, or ``dcp.async_save``. The states can be loaded at any world size. To load tensors, DCP
needs their keys and sizes, which depend on the changed rows and the world size of the save. :class:`SavedTracker` and
:class:`SavedCounters` therefore read the keys and sizes from the checkpoint first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from delta_tracker.errors import InvalidArgumentError, MalformedStateError, PartialStateError
from delta_tracker.tracker.checkpoint.rank_counters import MODE, RankCounters
from delta_tracker.tracker.checkpoint.rank_header import HEADER, Layout, RankHeader, parse

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
        self._saved = _SavedParts(source, key, "trackers", lambda part: part.mode != MODE)
        self._headers: Mapping[str, Tensor] = {}

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
        self._headers = self._saved.headers()
        if not self._headers:
            return _Wanted()
        parts = _parsed(self._headers)
        plan = self._tracker.plan_load(parts)
        return self._saved.wanted(parts, plan.needs())

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load the tracker's state from the loaded tensors.

        Raises the errors of :meth:`delta_tracker.tracker.tracker.ModelDeltaTracker.load_state_dict`.

        Args:
            state_dict: the tensors returned by :meth:`state_dict`, filled by ``dcp.load``; empty for a checkpoint
                without tracker state.
        """
        self._tracker.load_state_dict({**self._headers, **state_dict})


class SavedCounters:
    """``Stateful`` object for ``dcp.load`` that loads a :class:`~delta_tracker.RankCounters` from a checkpoint.

    Each rank reads the headers of all parts, and then the parts whose counters it loads. If a header is incompatible,
    or the checkpoint has no counters, every rank raises an error before any state is loaded.

    Args:
        counters: counters to load the states into.
        source: path of the checkpoint, or a storage reader for the checkpoint.
        key: key under which the counters were saved; None if the checkpoint has one such state.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"counters": counters, "model": model}  # doctest: +SKIP
        >>> dcp.save(state, checkpoint_id=path)  # doctest: +SKIP
        >>> state = {"counters": SavedCounters(counters, path), "model": model}  # doctest: +SKIP
        >>> dcp.load(state, checkpoint_id=path)  # doctest: +SKIP
    """

    def __init__(
        self, counters: RankCounters, source: str | os.PathLike[str] | StorageReader, key: str | None = None
    ) -> None:
        self._counters = counters
        self._saved = _SavedParts(source, key, "RankCounters", lambda part: part.mode == MODE)
        self._headers: Mapping[str, Tensor] = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return uninitialized tensors by name, for ``dcp.load`` to fill with the parts that this rank needs.

        Raises:
            InvalidArgumentError: if the checkpoint has no counters under ``key``, or if ``key`` is None and it has
                several :class:`~delta_tracker.RankCounters`.
            UnknownFormatError: if the format version of a header is unknown.
            StateMismatchError: if names or kinds of counters differ, or the number of ranks differs and a state cannot
                be merged.
            PartialStateError: if the checkpoint has no counters, or parts are missing.
            MalformedStateError: if a header is invalid, or if a tensor that a header lists is missing or has another
                shape.
        """
        self._headers = self._saved.headers()
        parts = _parsed(self._headers)
        # Each rank loads other parts: if only one rank raised, the others would wait for it.
        missing = sorted(set(range(parts[0].world_size)) - {part.rank for part in parts}) if parts else []
        if missing:
            raise PartialStateError("counters are missing", missing)
        plan = self._counters.plan_load(parts)
        return self._saved.wanted(parts, plan.needs())

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Replace the states of the counters by the loaded ones.

        Raises the errors of :meth:`delta_tracker.RankCounters.load_state_dict`.

        Args:
            state_dict: the tensors returned by :meth:`state_dict`, filled by ``dcp.load``.
        """
        self._counters.load_state_dict({**self._headers, **state_dict})


class _SavedParts:
    """Parts of a state in a checkpoint, each saved by one rank.

    Args:
        source: path of the checkpoint, or a storage reader for the checkpoint.
        key: key under which the state was saved; None if the checkpoint has one such state.
        what: name of such states, for error messages.
        is_wanted: returns True for the header of a part of such a state. Used if ``key`` is None.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | StorageReader,
        key: str | None,
        what: str,
        is_wanted: Callable[[RankHeader], bool],
    ) -> None:
        self._reader = source if isinstance(source, StorageReader) else FileSystemReader(source)
        self._key = key
        self._what = what
        self._is_wanted = is_wanted
        self._prefix = ""
        self._stored: Mapping[str, object] = {}

    def headers(self) -> dict[str, Tensor]:
        """Read the headers of all parts, without a collective. Return them by name; empty if there are none.

        Raises:
            InvalidArgumentError: if the checkpoint has such states, but none under ``key``, or several.
            UnknownFormatError, MalformedStateError: if a header cannot be read.
        """
        metadata = self._reader.read_metadata()
        self._stored = metadata.state_dict_metadata
        found: dict[str, list[str]] = {}
        for name in metadata.state_dict_metadata:
            if match := _KEY.fullmatch(name):
                found.setdefault(match["prefix"] or "", []).append(match["header"])
        read = {key: self._read(metadata, key, names) for key, names in found.items() if self._key in (None, key)}
        if self._key is None:
            read = {key: headers for key, headers in read.items() if all(map(self._is_wanted, _parsed(headers)))}
        if len(read) > 1 or (found and self._key is not None and not read):
            keys = sorted(read or found)
            raise InvalidArgumentError("key", self._key, f"Pass one of the {self._what} in the checkpoint: {keys}")
        for key, headers in read.items():
            self._prefix = f"{key}." if key else ""
            return headers
        return {}

    def wanted(self, parts: list[RankHeader], needs: Mapping[str, Layout]) -> dict[str, Tensor]:
        """Return uninitialized tensors by name for those that this rank needs.

        Raises:
            MalformedStateError: if the checkpoint lacks a tensor that a header lists, or has it in another shape.
        """
        # Check the parts of all ranks: if only one rank raised, the others would wait for it.
        layouts = {part.prefix + name: layout for part in parts for name, layout in part.all_layouts().items()}
        for name, (_, shape) in layouts.items():
            tensor = self._stored.get(self._prefix + name)
            if not isinstance(tensor, TensorStorageMetadata) or tuple(tensor.size) != shape:
                raise MalformedStateError(name, f"the checkpoint has no such tensor of shape {shape}")
        return _Wanted({name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in needs.items()})

    def _read(self, metadata: Metadata, key: str, headers: list[str]) -> dict[str, Tensor]:
        """Read the headers of all parts without a collective, and return the headers by name.

        Args:
            metadata: metadata of the checkpoint.
            key: key under which the state was saved; may be empty.
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


def _parsed(headers: Mapping[str, Tensor]) -> list[RankHeader]:
    return [parse(name, tensor) for name, tensor in headers.items()]
