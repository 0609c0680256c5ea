"""Writes versions into a serving model, a chunk of rows at a time, between its lookups."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from delta_tracker.errors import DenseMismatchError, InvalidArgumentError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.predictor.lock import TableLock
from delta_tracker.predictor.placement import Placement, place
from delta_tracker.predictor.targets import check_targets, find_targets, renamed
from delta_tracker.row_target import RowTarget, obstacle_of
from delta_tracker.sharding.presence import has_sharded
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import DenseSpec, Manifest

Model = nn.Module | Mapping[str, Tensor | RowTarget]


class Applier:
    """The model that versions are written into.

    Args:
        model: see :func:`~delta_tracker.predictor.targets.find_targets`.
        names: name in the stream to name in the model, of tables and of dense tensors, where they differ.
        takes_dense: write dense tensors too.
        lock: held for writing while rows are written.
        chunk_rows: maximum number of rows that are written under one hold of the lock.
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

    def resolve(self, manifest: Manifest) -> Receiver:
        """Look up what a version is written into, and refuse a version that the model cannot receive.

        The model is looked up for each version, so that ``model.to(device)`` and the like may be called in between.

        Raises:
            TableMismatchError, InvalidArgumentError: as :func:`~delta_tracker.predictor.targets.check_targets`.
            DenseMismatchError: for a dense tensor that the model does not have, or with another dtype or shape.
        """
        tables = find_targets(self._model)
        targets = renamed(tables, {name: own for name, own in self._names.items() if own in tables})
        check_targets(manifest, targets)
        return Receiver(targets, self._dense(manifest.dense))

    def write(self, placements: Iterable[Placement]) -> Iterator[int]:
        """Write the rows of a version, chunk by chunk; yield the number of rows after each chunk.

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

    def _dense(self, specs: Mapping[str, DenseSpec]) -> dict[str, Tensor]:
        """Return name in the stream to the model's tensor."""
        if not specs or not self._takes_dense:
            return {}
        held = _tensors(self._model)
        found: dict[str, Tensor] = {}
        names: dict[tuple[torch.device, int], str] = {}  # of the memory that was found
        for name, spec in specs.items():
            tensor = held.get(self._names.get(name, name))
            if tensor is None:
                raise DenseMismatchError(name, spec, "missing", sorted(held))
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise DenseMismatchError(name, spec, str(DenseSpec(tensor.dtype, tuple(tensor.shape))))
            obstacle = obstacle_of(tensor)
            if obstacle:
                raise DenseMismatchError(name, spec, obstacle)
            shared = names.setdefault((tensor.device, tensor.data_ptr()), name) if tensor.numel() else name
            if shared != name:
                raise DenseMismatchError(name, spec, f"in memory that {shared!r} has too (tied weights)")
            found[name] = tensor.detach()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Receiver:
    """What one version is written into: the model's tables and dense tensors as they were looked up for it.

    Args:
        targets: FQN to table.
        dense: name in the stream to dense tensor.
    """

    targets: Mapping[str, RowTarget]
    dense: Mapping[str, Tensor]

    def place(self, contents: Contents) -> list[Placement]:
        """Return where the rows of the version go, in the order in which to write them. Nothing is written yet.

        Raises:
            PartialRowsError: if a table takes whole rows and the version has a part of one.
        """
        return [*place(contents.whole, self.targets), *place(contents.listed, self.targets)]

    @torch.no_grad()
    def write_dense(self, contents: Contents) -> None:
        """Write the dense tensors of the version. The caller holds the lock for writing."""
        for name, tensor in self.dense.items():
            tensor.copy_(contents.dense[name])


def _tensors(model: Model) -> dict[str, Tensor]:
    """Every tensor of a model that a dense one could be written into."""
    if not isinstance(model, nn.Module):
        return {name: tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}
    if has_sharded(model):
        from delta_tracker.sharding.dense import dense_tensors  # noqa: PLC0415  it needs torchrec

        return dense_tensors(model, model)
    named = itertools.chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in named}
