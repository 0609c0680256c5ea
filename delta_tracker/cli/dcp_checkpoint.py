"""Export a version as a ``torch.distributed.checkpoint`` (DCP) checkpoint, which TorchRec can load."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import checkpoint as dcp

from delta_tracker.cli.version_tables import mapped, rows_spec, write_versions
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.recovery.recovery_path import recovery_path
from delta_tracker.recovery.targets import RowWriter, state_table
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.row_target import Region, RowTarget, TensorTarget
from delta_tracker.stream.format.manifest import DenseSpec, Manifest
from delta_tracker.stream.format.part_reader import dense_of, read_parts
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import path_to
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec, StateSpec, TableSpec, TableStates

# FBGEMM's name of an optimizer to the keys of its states in TorchRec's checkpoints, without the name of the table. Of
# the first state, TorchRec always writes ``momentum1``; of the others, the names of FBGEMM's ``get_optimizer_state``.
_STATE_KEYS = {
    "EXACT_ADAGRAD": ("momentum1",),
    "EXACT_ROWWISE_ADAGRAD": ("momentum1",),
    "ADAM": ("momentum1", "exp_avg_sq"),
    "PARTIAL_ROWWISE_ADAM": ("momentum1", "exp_avg_sq"),
    "LAMB": ("momentum1", "exp_avg_sq"),
    "PARTIAL_ROWWISE_LAMB": ("momentum1", "exp_avg_sq"),
}


def entries_of(log: StreamLog, version: int) -> list[Manifest]:
    """Return the entries that :func:`write_checkpoint` needs to export ``version``, in order.

    Raises:
        InvalidArgumentError: if the version is not committed yet, if a table has raw ids, or if the names of an
            optimizer's states in TorchRec checkpoints are unknown.
        NotRecoverableError: if the version has training states but cannot be restored.
    """
    path = path_to(log, version, of_any=True)
    for fqn in path[-1].identities:
        raise InvalidArgumentError("--dcp", fqn, "Choose --out: the table has raw ids, which --dcp cannot write")
    if path[-1].training:
        head = log.head()
        if head is not None and head.stream != path[-1].stream:
            remedy = "Choose --out, or a version of the present stream: training states of the former one are not read"
            raise InvalidArgumentError("--dcp", f"version {version}", remedy)
        path = recovery_path(log, version)
    for fqn, states in path[-1].states.items():
        if states.states and len(states.states) != len(_STATE_KEYS.get(states.optimizer, ())):
            raise InvalidArgumentError("--dcp", states.optimizer, f"Choose --out: its states of {fqn!r} are not known")
    return path


def write_checkpoint(
    storage: Storage, path: Sequence[Manifest], directory: Path, work: Path, advance: Callable[[int], None]
) -> None:
    """Write a version to ``directory`` as a DCP checkpoint.

    The keys are those of ``{"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}`` for a
    ``DistributedModelParallel``. The key ``optimizer`` is omitted if the version contains no states of fused
    optimizers. If the version contains training states, the state of rank 0 is stored under ``training_state``.

    ``path`` is the result of :func:`entries_of` for the version. ``directory`` must not exist. ``work`` is an existing
    directory for memory-mapped files, which are as large as the tables and their states. ``advance`` is called after
    each entry with the entry's size in bytes.
    """
    rows = mapped(work / "tables", {fqn: rows_spec(spec) for fqn, spec in path[0].tables.items()})
    if path[-1].training:
        state = _with_states(storage, path, rows, work, advance)
    else:
        state = {"model": _weights(rows) | write_versions(storage, path, rows, {}, like=path[0], advance=advance)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process writes the checkpoint, as intended
        dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)


def _with_states(
    storage: Storage, path: Sequence[Manifest], rows: Mapping[str, Tensor], work: Path, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Read versions with training states into memory-mapped files. Return the object to save as the checkpoint."""
    last = path[-1]
    targets: dict[str, RowTarget] = {fqn: TensorTarget.of(room) for fqn, room in rows.items()}
    optimizer: dict[str, dict[str, Tensor]] = {}
    for number, (fqn, states) in enumerate(last.states.items()):
        if states.states:
            spec = last.tables[fqn]
            # As in TorchRec's checkpoint.
            shapes = {"columns": (spec.num_rows, spec.dim), "range": (spec.num_rows * len(states.columns),)}
            specs = {each.name: DenseSpec(each.dtype_name, shapes[each.width]) for each in states.states}
            rooms = mapped(work / f"states-{number}", specs)
            targets |= {state_table(fqn, each): _target(each, states, spec, rooms[each.name]) for each in states.states}
            table, keys = fqn.rpartition(".")[2], _STATE_KEYS[states.optimizer]
            pairs = zip(keys, states.states, strict=True)
            optimizer[f"{fqn}.weight"] = {f"{table}.{key}": rooms[each.name] for key, each in pairs}
    shards = {fqn: ShardSpec(spec, 0, spec.num_rows, ((0, spec.dim),)) for fqn, spec in last.tables.items()}
    writer = RowWriter(storage, shards, targets)
    for entry in path:
        writer.write(entry)
        advance(entry.num_bytes)
    training = TrainingStates(storage, last)
    parts = tuple(part for part in last.parts if part.dense)
    dense = training.dense() | dense_of(read_parts(storage, replace(last, parts=parts)))
    state = {"model": _weights(rows) | dense, "training_state": training.load(0, "training")}
    return state | {"optimizer": {"state": optimizer}} if optimizer else state


def _target(state: StateSpec, states: TableStates, table: TableSpec, room: Tensor) -> RowTarget:
    """Return a target that writes the state to ``room``, a tensor of the shape that :func:`_state_specs` returns."""
    if state.width == "columns":
        return TensorTarget.of(room)
    num_ranges, rows = len(states.columns), (0, table.num_rows)
    by_range = room.view(num_ranges, table.num_rows, 1)
    regions = [Region(rows, (number, number + 1), by_range[number]) for number in range(num_ranges)]
    return TensorTarget(table.num_rows, num_ranges, state.dtype, regions)


def _weights(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{fqn}.weight": room for fqn, room in rows.items()}
