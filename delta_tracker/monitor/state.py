"""Counters of the training run through checkpoints: each rank saves its own, none is lost, none is counted twice.

Only counters defined with ``is_logical=True`` take part: they count the run. All others describe a process, and begin
at 0 with it.

A rank's state is one uint8 tensor of JSON under a key of its own. Tensors that ranks save under one key are
deduplicated by torch.distributed.checkpoint, and all counters but one rank's would be gone. Loaded by another number of
ranks, rank ``r`` takes over the counters of the saved ranks ``r, r + W, r + 2W, ...``, so the sum over ranks stays.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, convert

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.default import MONITOR
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.stat import Kind, Stat

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.checkpoint.storage import StorageReader

KEY = "delta_tracker.monitor"
"""Under this key the state stands in a checkpoint."""

_FORMAT = "totals by label values"
_REMEDY = "These are no counters of this format: load a checkpoint that this library saved"
_MAX_BYTES = 64 * 2**20

# Whole numbers stay whole.
_Total = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
Totals = dict[str, list[tuple[list[str], _Total]]]
"""Name of each counter to label values and total of each cell."""


def totals(monitor: Monitor = MONITOR) -> Totals:
    """The logical counters of this process now."""
    found: Totals = {}
    for stat in _logical(monitor):
        cells = [([value for _, value in cell.labels], cell.collect_total()) for cell in stat.cells]
        found[stat.name] = [(values, total) for values, total in cells if total]
    return found


def restore(parts: Iterable[Totals], monitor: Monitor = MONITOR) -> None:
    """Put the logical counters to the sum of ``parts``, whatever was counted here before; one in no part goes to 0.

    Call it after your counters are defined: one that is not defined is left out, as one that the program does not have
    any more. The library's own need no definition.

    Raises:
        InvalidArgumentError: if a counter's labels are others than when it was saved; nothing is restored then.
    """
    summed = _fitting(parts, monitor)
    stats = {stat.name: stat for stat in _logical(monitor)}
    for stat in stats.values():
        for cell in stat.cells:
            cell.restore(summed.pop((stat.name, tuple(value for _, value in cell.labels)), 0))
    for (name, label_values), total in summed.items():
        if name in stats:
            labels = dict(zip(stats[name].definition.labels, label_values, strict=True))
            cell = stats[name].cell(**labels)
            cell.restore(cell.collect_total() + total)  # several may share the one for what has none of its own


class LogicalCounters:
    """The logical counters as what a tracker's checkpoint can carry: register it there beside metrics.

    A part is what one rank counted; a load gives each saved part to exactly one rank.

    Args:
        monitor: whose counters.
    """

    def __init__(self, monitor: Monitor = MONITOR) -> None:
        self._monitor = monitor

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, which JSON can hold."""
        return {_FORMAT: totals(self._monitor)}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One part that stands for all ``states``.

        Raises:
            InvalidArgumentError: if one is malformed, or a counter's labels are others than when it was saved.
        """
        merged: Totals = {}
        for (name, values), total in _fitting(map(_parsed, states), self._monitor).items():
            merged.setdefault(name, []).append((list(values), total))
        return {_FORMAT: merged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters to a part, see :func:`restore`."""
        restore([_parsed(state)], self._monitor)


def state_dict(rank: int, monitor: Monitor = MONITOR) -> dict[str, Tensor]:
    """What a rank saves: put it under :data:`KEY` into the dict that goes to ``dcp.save``.

    Args:
        rank: this rank.
        monitor: whose counters.

    Returns:
        ``rank_<rank>`` to a ``[bytes]`` uint8 tensor.
    """
    import torch  # noqa: PLC0415  the monitor imports without it

    text = json.dumps({_FORMAT: totals(monitor)}).encode()
    return {f"rank_{rank}": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def load(reader: StorageReader, rank: int, world_size: int, monitor: Monitor = MONITOR) -> int:
    """Restore this rank's counters from a checkpoint that any number of ranks saved. No collective.

    Args:
        reader: of the checkpoint, such as ``FileSystemReader(path)``.
        rank: this rank.
        world_size: how many load.
        monitor: whose counters.

    Returns:
        Of how many saved ranks; 0 if the checkpoint has no counters, which leaves them as they are.

    Raises:
        InvalidArgumentError: if what was saved is malformed; nothing is restored then.
    """
    import torch  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_loader import load as load_tensors  # noqa: PLC0415

    prefix = f"{KEY}.rank_"
    sizes: dict[int, Any] = {}
    for name, metadata in reader.read_metadata().state_dict_metadata.items():
        suffix = name.removeprefix(prefix)
        if name != suffix and suffix.isdecimal():
            sizes[int(suffix)] = metadata
    if not sizes:
        return 0
    mine = sorted(saved for saved in sizes if saved % world_size == rank)
    wanted = {f"rank_{saved}": torch.empty(_num_bytes(sizes[saved]), dtype=torch.uint8) for saved in mine}
    if wanted:
        with warnings.catch_warnings():
            # It says that one process loads, which is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_tensors({KEY: wanted}, storage_reader=reader, no_dist=True)
    restore([_parsed(_decoded(bytes(each.tolist()))) for each in wanted.values()], monitor)
    return len(mine)


def _summed(parts: Iterable[Totals]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Name and label values to the total over all parts."""
    summed: dict[tuple[str, tuple[str, ...]], float] = {}
    for part in parts:
        for name, cells in part.items():
            for values, total in cells:
                key = (name, tuple(values))
                summed[key] = summed.get(key, 0) + total
    return summed


def _fitting(parts: Iterable[Totals], monitor: Monitor) -> dict[tuple[str, tuple[str, ...]], float]:
    """As :func:`_summed`, of counters whose labels are those that they have here.

    Raises:
        InvalidArgumentError: if they are not.
    """
    summed = _summed(parts)
    # These are registered when they first count, which is after a load.
    monitor.metrics.define(name for name, _ in summed)
    stats = {stat.name: stat for stat in _logical(monitor)}
    for name, label_values in summed:
        if name in stats and len(label_values) != len(stats[name].definition.labels):
            remedy = f"It has the labels {list(stats[name].definition.labels)}: restore it before you change them"
            raise InvalidArgumentError("labels", (name, label_values), remedy)
    return summed


def _logical(monitor: Monitor) -> Sequence[Stat]:
    return [stat for stat in monitor.find(kind=Kind.COUNTER) if stat.definition.is_logical]


def _num_bytes(metadata: Any) -> int:  # noqa: ANN401  torch's TensorStorageMetadata, or what stands there
    size = tuple(getattr(metadata, "size", ()))
    if len(size) != 1 or not 0 < size[0] <= _MAX_BYTES:
        raise InvalidArgumentError("reader", size, f"The counters of a rank are 1 to {_MAX_BYTES} bytes")
    return int(size[0])


def _decoded(text: bytes) -> object:
    try:
        found: object = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError("state", text[:40], _REMEDY) from error
    return found


def _parsed(saved: Any) -> Totals:  # noqa: ANN401  whatever was found in a checkpoint
    """The totals in what was saved.

    Raises:
        InvalidArgumentError: if it is not what :meth:`LogicalCounters.state_dict` gave.
    """
    try:
        return convert(saved[_FORMAT], Totals)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArgumentError("state", str(saved)[:40], _REMEDY) from error
