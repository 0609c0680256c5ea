"""Adapters that load trackers and counters from a checkpoint of ``torch.distributed.checkpoint`` (DCP).

To save, pass the tracker or the :class:`~delta_tracker.RankCounters` itself: ``dcp.save({"model": model, "tracker":
tracker}, checkpoint_id=path)``, or ``dcp.async_save``. The states can be loaded at any world size. To load tensors, DCP
needs their keys and sizes, which depend on the changed rows and the world size of the save. :class:`SavedTracker` and
:class:`SavedCounters` therefore read the keys and sizes from the checkpoint first. Some planners, such as
``DefaultLoadPlanner(allow_partial_load=True)``, skip tensors. Both classes detect this after the load.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader

from delta_tracker.errors import CheckpointError, InvalidArgumentError
from delta_tracker.tracker.checkpoint.collectives import dcp_load_frame
from delta_tracker.tracker.checkpoint.part import HEADER, Layout, RankHeader, counter_layouts, parse
from delta_tracker.tracker.checkpoint.rank_counters import MODE, RankCounters
from delta_tracker.tracker.tracker import ModelDeltaTracker

_KEY = re.compile(rf"(?:(?P<prefix>.*)\.)?(?P<header>{HEADER.pattern})")
_MAX_HEADER_BYTES = 1 << 28

Checkpoint: TypeAlias = str | os.PathLike[str] | StorageReader
"""Path of a checkpoint, or a storage reader for it."""


class _Wanted(dict[str, Tensor]):
    """Dict of the tensors to load, by name. If the dict is empty, ``values()`` returns a placeholder tensor.

    If a rank has no shard of some table, DCP retries the load with the key flattening of torch 2.3. That flattening
    treats an empty dict as a value, and the checkpoint has no entry for this value.
    """

    def values(self) -> Any:  # noqa: ANN401  dict's own view type cannot be constructed
        return super().values() or [torch.empty(0)]


class SavedTracker:
    """``Stateful`` object for ``dcp.load`` that loads a tracker's state from a checkpoint.

    A saved state has one part per rank of the saving job. To load the state, each rank reads the headers of all parts,
    and the parts that contain rows of its shards. ``dcp.load`` calls :meth:`state_dict`, fills the tensors, and calls
    :meth:`load_state_dict`. If a header is incompatible or a tensor is missing, every rank raises an error before any
    state, including the state of the model, is loaded.

    The model must be restored first. DCP restores in alphabetical order of the keys, so the tracker needs a key after
    the key of the model, such as ``"tracker"`` after ``"model"``. Otherwise, :meth:`state_dict` raises an error.

    Args:
        tracker: tracker to load the state into.
        source: path of the checkpoint, or a storage reader for the checkpoint.
        key: key under which the tracker was saved; None if the checkpoint contains only one tracker.

    Raises InvalidArgumentError if ``tracker`` is not a ModelDeltaTracker.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"model": model, "tracker": SavedTracker(tracker, path)}  # doctest: +SKIP
        >>> dcp.load(state, checkpoint_id=path)  # doctest: +SKIP
    """

    def __init__(self, tracker: ModelDeltaTracker, source: Checkpoint, key: str | None = None) -> None:
        if not isinstance(tracker, ModelDeltaTracker):
            raise InvalidArgumentError("tracker", type(tracker), "Pass a ModelDeltaTracker first, and then the path")
        self._tracker = tracker
        self._saved = _SavedParts(source, key, "trackers", lambda part: part.mode != MODE)

    def state_dict(self) -> dict[str, Tensor]:
        """Return uninitialized tensors by name. ``dcp.load`` fills them with the parts that this rank needs.

        The result is empty if the checkpoint has no tracker state.

        Raises:
            InvalidArgumentError: if the checkpoint contains trackers, but none under ``key``; if it contains several
                trackers and ``key`` is None; or if ``dcp.load`` would load the model after the tracker.
            StateMismatchError: if the saved state cannot be loaded into this tracker.
            CheckpointError: if parts are missing, a header is invalid, or a tensor is missing or has another shape.
        """
        _refuse_later_model(self, self._tracker)
        parts = self._saved.parts()
        if not parts:
            return _Wanted()
        return self._saved.wanted(parts, self._tracker.checkpoint.plan_load(parts).needs())

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Load the tracker's state from the result of :meth:`state_dict`, filled by ``dcp.load``.

        Raises CheckpointError if ``dcp.load`` did not load the tensors or loaded another checkpoint. Also raises the
        errors of :meth:`ModelDeltaTracker.load_state_dict`. After an error, the tracker is unchanged.
        """
        self._tracker.load_state_dict(self._saved.loaded(state_dict))


def _refuse_later_model(saved: SavedTracker, tracker: ModelDeltaTracker) -> None:
    """Raise InvalidArgumentError if the running ``dcp.load`` would load the tracked model after ``saved``.

    All rows would then count as changed, and old states would be values from before the load.
    """
    frame = dcp_load_frame()
    states = None if frame is None else frame.f_locals.get("state_dict")
    if not isinstance(states, Mapping):
        return
    tables = {id(module) for module in _modules_with_tables(tracker)}
    own = min((str(key) for key, state in states.items() if state is saved), default="")
    later = [str(key) for key, state in states.items() if own and str(key) > own and _loads_any(state, tables)]
    if later:
        raise InvalidArgumentError(
            "dcp.load()",
            f"it would load the model under {min(later)!r} after its tracker under {own!r}",
            f"Load {min(later)!r} in a call of dcp.load() before that of {own!r}, or save the model under a key before "
            "the tracker's in alphabetical order",
        )


def _modules_with_tables(tracker: ModelDeltaTracker) -> Iterable[nn.Module]:
    plain = (module for module in tracker.model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return tracker.tracked_modules.values() or plain


def _loads_any(state: object, modules: set[int]) -> bool:
    """Return True if an object, or an attribute of it, is a module that contains one of ``modules``, by ``id()``.

    Return False for a dict of tensors: DCP fills the tensors in place before it calls any ``load_state_dict``.
    """
    held = [state, *getattr(state, "__dict__", {}).values()] if isinstance(state, Stateful) else []
    return any(id(inner) in modules for each in held if isinstance(each, nn.Module) for inner in each.modules())


class SavedCounters:
    """``Stateful`` object for ``dcp.load`` that loads a :class:`~delta_tracker.RankCounters` from a checkpoint.

    Each rank reads the headers of all parts, and then the parts that contain its counters. If a header is incompatible
    or the checkpoint contains no counters, every rank raises an error before any state is loaded.

    Args:
        counters: counters to load the states into.
        source: path of the checkpoint, or a storage reader for the checkpoint.
        key: key under which the counters were saved; None if the checkpoint contains only one RankCounters.

    Raises InvalidArgumentError if ``counters`` is not a RankCounters.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"counters": counters, "model": model}  # doctest: +SKIP
        >>> dcp.save(state, checkpoint_id=path)  # doctest: +SKIP
        >>> state = {"counters": SavedCounters(counters, path), "model": model}  # doctest: +SKIP
        >>> dcp.load(state, checkpoint_id=path)  # doctest: +SKIP
    """

    def __init__(self, counters: RankCounters, source: Checkpoint, key: str | None = None) -> None:
        if not isinstance(counters, RankCounters):
            raise InvalidArgumentError("counters", type(counters), "Pass a RankCounters first, and then the path")
        self._counters = counters
        self._saved = _SavedParts(source, key, "RankCounters", lambda part: part.mode == MODE)

    def state_dict(self) -> dict[str, Tensor]:
        """Return uninitialized tensors by name. ``dcp.load`` fills them with the parts that this rank needs.

        Raises the same errors as :meth:`SavedTracker.state_dict`, and CheckpointError if there are no counters.
        """
        parts = self._saved.parts()
        # Each rank loads other parts: if only one rank raised, the others would wait for it.
        missing = sorted(set(range(parts[0].world_size)) - {part.rank for part in parts}) if parts else []
        if missing:
            raise CheckpointError(None, "counters are missing", missing)
        return self._saved.wanted(parts, counter_layouts(self._counters.plan_load(parts)))

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Replace the states of the counters with the result of :meth:`state_dict`, filled by ``dcp.load``.

        Raises the same errors as :meth:`SavedTracker.load_state_dict`. After an error, the counters are unchanged.
        """
        self._counters.load_state_dict(self._saved.loaded(state_dict))


class _SavedParts:
    """Parts of a state in a checkpoint, each saved by one rank.

    ``source`` and ``key`` are the arguments of :class:`SavedTracker`. ``what`` describes the states in error messages.
    If ``key`` is None, ``is_wanted`` selects the parts by their headers.
    """

    def __init__(self, source: Checkpoint, key: str | None, what: str, is_wanted: Callable[[RankHeader], bool]) -> None:
        self._reader = source if isinstance(source, StorageReader) else FileSystemReader(source)
        self._key = key
        self._what = what
        self._is_wanted = is_wanted
        self._prefix = ""
        self._metadata = Metadata({})
        self._headers: Mapping[str, Tensor] = {}

    def parts(self) -> list[RankHeader]:
        """Return the headers of all parts, without a collective; an empty list if there are none.

        Raises InvalidArgumentError if all saved states have other keys, or if ``key`` is None and there are several.
        """
        self._metadata = self._reader.read_metadata()
        found: dict[str, list[str]] = {}
        for name in self._metadata.state_dict_metadata:
            if match := _KEY.fullmatch(name):
                prefix = match["prefix"]
                found.setdefault("" if prefix is None else f"{prefix}.", []).append(match["header"])
        read = {
            prefix: self._read_headers(prefix, names)
            for prefix, names in found.items()
            if self._key is None or self._key == prefix.removesuffix(".")
        }
        if self._key is None:
            read = {prefix: headers for prefix, headers in read.items() if all(map(self._is_wanted, _parsed(headers)))}
        if len(read) > 1 or (found and self._key is not None and not read):
            keys = sorted(prefix.removesuffix(".") for prefix in read or found)
            raise InvalidArgumentError("key", self._key, f"Pass one of the {self._what} in the checkpoint: {keys}")
        self._prefix, self._headers = next(iter(read.items()), ("", {}))
        return _parsed(self._headers)

    def wanted(self, parts: list[RankHeader], needs: Mapping[str, Layout]) -> dict[str, Tensor]:
        """Return uninitialized tensors for ``dcp.load`` to fill, and a header of zeros, by name.

        All ranks load the same header. :meth:`loaded` checks it to find out whether DCP has loaded this state.
        """
        # Check the parts of all ranks: if only one rank raised, the others would wait for it.
        layouts = {part.prefix + name: layout for part in parts for name, layout in part.all_layouts().items()}
        for name, (_, shape) in layouts.items():
            tensor = self._metadata.state_dict_metadata.get(self._prefix + name)
            if not isinstance(tensor, TensorStorageMetadata) or tuple(tensor.size) != shape:
                raise CheckpointError(name, f"the checkpoint has no such tensor of shape {shape}")
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in needs.items()}
        first = min(self._headers)
        return _Wanted({first: torch.zeros_like(self._headers[first]), **tensors})

    def loaded(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the headers and the loaded tensors. Raise CheckpointError if DCP has not loaded this state."""
        if not self._headers:
            return dict(state)
        first, parts = min(self._headers), _parsed(self._headers)
        if first not in state or not torch.equal(state[first].cpu(), self._headers[first]):
            remedy = (
                f"Pass it to dcp.load under the key {self._prefix[:-1]!r}, with the checkpoint that it was built with"
                if self._prefix
                else "Pass its state_dict() to dcp.load without a key, then pass the result to its load_state_dict()"
            )
            reason = f"dcp.load has skipped {self._prefix + first!r}, or loaded another checkpoint"
            raise CheckpointError(None, reason, sorted(part.rank for part in parts)).with_remedy(remedy)
        return {**state, **self._headers}

    def _read_headers(self, prefix: str, names: list[str]) -> dict[str, Tensor]:
        """Return headers by name, without a collective. Raise CheckpointError if one is too large or not a tensor."""
        targets = {}
        for name in names:
            layout = self._metadata.state_dict_metadata[prefix + name]
            if not isinstance(layout, TensorStorageMetadata) or layout.size.numel() > _MAX_HEADER_BYTES:
                raise CheckpointError(prefix + name, "its header is not a tensor, or is too large")
            targets[prefix + name] = torch.empty(layout.size, dtype=layout.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(targets, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()
        return {name: targets[prefix + name] for name in names}


def _parsed(headers: Mapping[str, Tensor]) -> list[RankHeader]:
    return [parse(name, tensor) for name, tensor in headers.items()]
