"""Writes versions into a serving model, a chunk of rows at a time, between its lookups."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from delta_tracker.errors import DenseMismatchError, InvalidArgumentError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.lock import TableLock
from delta_tracker.predictor.placement import Placement, place
from delta_tracker.predictor.targets import check_targets, find_targets
from delta_tracker.row_target import RowTarget, obstacle_of
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import DenseSpec, Manifest

Model = nn.Module | Mapping[str, Tensor | RowTarget]


class Applier:
    """The tables and dense tensors of a model, as something that versions are written into.

    They are looked up anew for each version, so that ``model.to(device)`` and the like may be called in between.

    Args:
        model: see :func:`~delta_tracker.predictor.targets.find_targets`.
        names: name in the stream to name in the model, of tables and of dense tensors, where they differ.
        takes_dense: write dense tensors too.
        lock: held for writing while rows are written.
        chunk_rows: rows that are written under one hold of the lock, at most.
        recorder: records how long versions take.

    Raises:
        InvalidArgumentError: as :func:`~delta_tracker.predictor.targets.find_targets`.
    """

    def __init__(
        self,
        model: Model,
        names: Mapping[str, str],
        *,
        takes_dense: bool,
        lock: TableLock,
        chunk_rows: int,
        recorder: Recorder,
    ) -> None:
        if not isinstance(names, Mapping):
            raise InvalidArgumentError("names", names, "Pass a mapping of name in the stream to name in the model")
        self._model = model
        self._names = dict(names)
        self._takes_dense = takes_dense
        self._lock = lock
        self._chunk_rows = chunk_rows
        self._timer = recorder.apply_seconds.timer()
        known = {*find_targets(model), *_tensors(model)}
        for own in self._names.values():
            if own not in known:
                raise InvalidArgumentError("names", own, f"Name what the model has: {sorted(known)}")

    def check(self, manifest: Manifest) -> None:
        """Refuse a version that the model cannot receive, before any of it is read.

        Raises:
            TableMismatchError, InvalidArgumentError: as :func:`~delta_tracker.predictor.targets.check_targets`.
            DenseMismatchError: for a dense tensor that the model has not, or not like this.
        """
        check_targets(manifest, self._targets())
        self._dense(manifest.dense)

    def place(self, contents: Contents) -> list[Placement]:
        """Where the rows of a version go, in the order in which they are to be written. Nothing is written yet.

        Raises:
            PartialRowsError: if a table takes whole rows and the version has a part of one.
        """
        targets = self._targets()
        return place(contents.whole, targets) + place(contents.listed, targets)

    def write(self, placements: Iterable[Placement]) -> Iterator[int]:
        """Write the rows of a version, chunk by chunk; gives the number of rows after each chunk.

        Raises:
            CorruptPartError: if a large part has changed since it was checked; some rows are written.
            StorageError: if it cannot be read again; some rows are written.
        """
        with self._timer():
            for placement in placements:
                for chunk in placement.chunks(self._chunk_rows):
                    with self._lock.writing():
                        chunk.write()
                    yield chunk.num_rows

    @torch.no_grad()
    def write_dense(self, contents: Contents) -> None:
        """Write the dense tensors of a version. The caller holds the lock for writing."""
        for name, tensor in self._dense(contents.manifest.dense).items():
            tensor.copy_(contents.dense[name])

    def _targets(self) -> dict[str, RowTarget]:
        tables = find_targets(self._model)
        return find_targets(self._model, {name: own for name, own in self._names.items() if own in tables})

    def _dense(self, specs: Mapping[str, DenseSpec]) -> dict[str, Tensor]:
        """Name in the stream to the model's tensor."""
        if not specs or not self._takes_dense:
            return {}
        held = _tensors(self._model)
        found: dict[str, Tensor] = {}
        for name, spec in specs.items():
            tensor = held.get(self._names.get(name, name))
            if tensor is None:
                raise DenseMismatchError(name, spec, "missing", sorted(held))
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise DenseMismatchError(name, spec, str(DenseSpec(tensor.dtype, tuple(tensor.shape))))
            obstacle = obstacle_of(tensor)
            shared = next((other for other, one in found.items() if _is_same(one, tensor)), None)
            if obstacle or shared is not None:
                raise DenseMismatchError(name, spec, obstacle or f"in memory that {shared!r} has too (tied weights)")
            found[name] = tensor.detach()
        return found


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.data_ptr() == other.data_ptr() and one.numel() * other.numel() > 0


def _tensors(model: Model) -> dict[str, Tensor]:
    """Every tensor of a model that a dense one could be written into."""
    if not isinstance(model, nn.Module):
        return {name: tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    if any(kind.__module__.startswith("torchrec.distributed.") for kind in kinds):
        from delta_tracker.sharding.dense import dense_tensors  # noqa: PLC0415  it needs torchrec

        return dense_tensors(model, model)
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in named}
