"""Save logical counters in checkpoints, and restore them at any world size with the same sum over all ranks.

A logical counter is defined with ``is_logical=True``. It describes the training run. All other counters describe the
process: they are not saved, and start at 0.

A rank saves one uint8 tensor of JSON under its own key, because torch.distributed.checkpoint deduplicates tensors that
ranks save under the same key. At a world size ``W``, rank ``r`` restores the counters of the saved ranks
``r, r + W, r + 2W, ...``.
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
"""Key of the counters in a checkpoint."""

_FORMAT = "totals by label values"
_REMEDY = "Load a checkpoint that this library saved: this state is not in the counters' format"
_MAX_BYTES = 64 * 2**20

# int first, so that integers are not converted to floats.
_Total = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]
Totals = dict[str, list[tuple[list[str], _Total]]]
"""For each counter name, a list of (label values, total), one per cell."""


def totals(monitor: Monitor = MONITOR) -> Totals:
    """Return the nonzero totals of the logical counters of ``monitor`` in this process."""
    found: Totals = {}
    for stat in _logical(monitor):
        cells = [([value for _, value in cell.labels], cell.collect_total()) for cell in stat.cells]
        found[stat.name] = [(values, total) for values, total in cells if total]
    return found


def restore(parts: Iterable[Totals], monitor: Monitor = MONITOR) -> None:
    """Set the logical counters to the sum of ``parts``, discarding earlier counts.

    Counters that are missing in all parts are set to 0. Define your counters before the call: undefined ones are
    ignored. Built-in counters need no definition.

    Args:
        parts: results of :func:`totals`, one for each saved rank.
        monitor: the monitor of the counters.

    Raises:
        InvalidArgumentError: if a counter is defined with another number of labels than it was saved with; nothing is
            restored.
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
            cell.restore(cell.collect_total() + total)  # beyond max_cells, several label sets share the cell "other"


class LogicalCounters:
    """Adapter that saves logical counters with a tracker's state; pass it to ``ModelDeltaTracker.register_counter()``.

    A state has the counters of one rank. A load restores each saved state on exactly one rank.

    Args:
        monitor: the monitor of the counters.
    """

    def __init__(self, monitor: Monitor = MONITOR) -> None:
        self._monitor = monitor

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's counters as JSON-compatible values."""
        return {_FORMAT: totals(self._monitor)}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one state with the totals summed over ``states``.

        Raises:
            InvalidArgumentError: if a state is malformed, or a counter is defined with another number of labels than it
                was saved with.
        """
        merged: Totals = {}
        for (name, values), total in _fitting(map(_parsed, states), self._monitor).items():
            merged.setdefault(name, []).append((list(values), total))
        return {_FORMAT: merged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters from a state, see :func:`restore`.

        Raises:
            InvalidArgumentError: if the state is malformed, or a counter is defined with another number of labels than
                it was saved with; nothing is restored.
        """
        restore([_parsed(state)], self._monitor)


def state_dict(rank: int, monitor: Monitor = MONITOR) -> dict[str, Tensor]:
    """Return this rank's counters as a state dict. Pass it to ``dcp.save`` under :data:`KEY`.

    Args:
        rank: this rank.
        monitor: the monitor of the counters.

    Returns:
        A dict with the single key ``rank_<rank>``. Its value is a one-dimensional uint8 tensor with the bytes of a JSON
        text.
    """
    import torch  # noqa: PLC0415  the monitor can be imported without torch

    text = json.dumps({_FORMAT: totals(monitor)}).encode()
    return {f"rank_{rank}": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def load(reader: StorageReader, rank: int, world_size: int, monitor: Monitor = MONITOR) -> int:
    """Restore this rank's counters from a checkpoint saved at any world size. Not a collective.

    Args:
        reader: reader of the checkpoint, such as ``FileSystemReader(path)``.
        rank: this rank.
        world_size: number of ranks that load.
        monitor: the monitor of the counters.

    Returns:
        Number of saved ranks whose counters were restored on this rank. If fewer than ``world_size`` ranks were saved,
        some ranks restore none and set their counters to 0. If the checkpoint has no counters, all ranks return 0 and
        leave their counters unchanged.

    Raises:
        InvalidArgumentError: if the saved state is malformed, or a counter is defined with another number of labels
            than it was saved with; nothing is restored.
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
            # Loading in a single process is intended.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_tensors({KEY: wanted}, storage_reader=reader, no_dist=True)
    restore([_parsed(_decoded(bytes(each.tolist()))) for each in wanted.values()], monitor)
    return len(mine)


def _summed(parts: Iterable[Totals]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the total of each cell over all parts, by counter name and label values."""
    summed: dict[tuple[str, tuple[str, ...]], float] = {}
    for part in parts:
        for name, cells in part.items():
            for values, total in cells:
                key = (name, tuple(values))
                summed[key] = summed.get(key, 0) + total
    return summed


def _fitting(parts: Iterable[Totals], monitor: Monitor) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return the result of :func:`_summed`, and check the number of labels of each counter in it.

    Defines the built-in counters that occur in ``parts``.

    Raises:
        InvalidArgumentError: if a counter is defined with another number of labels than it was saved with.
    """
    summed = _summed(parts)
    # Built-in counters are otherwise registered at their first use, which is after a load.
    monitor.metrics.define(name for name, _ in summed)
    stats = {stat.name: stat for stat in _logical(monitor)}
    for name, label_values in summed:
        if name in stats and len(label_values) != len(stats[name].definition.labels):
            remedy = f"Use the labels it was saved with: the counter has {list(stats[name].definition.labels)}"
            raise InvalidArgumentError("labels", (name, label_values), remedy)
    return summed


def _logical(monitor: Monitor) -> Sequence[Stat]:
    return [stat for stat in monitor.find(kind=Kind.COUNTER) if stat.definition.is_logical]


def _num_bytes(metadata: Any) -> int:  # noqa: ANN401  torch's TensorStorageMetadata, if the checkpoint is valid
    size = tuple(getattr(metadata, "size", ()))
    if len(size) != 1 or not 0 < size[0] <= _MAX_BYTES:
        raise InvalidArgumentError(
            "reader",
            size,
            f"Pass a reader of counters that this library saved, of 1 to {_MAX_BYTES} bytes for each rank",
        )
    return int(size[0])


def _decoded(text: bytes) -> object:
    try:
        found: object = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError("state", text[:40], _REMEDY) from error
    return found


def _parsed(saved: Any) -> Totals:  # noqa: ANN401  untrusted data from a checkpoint
    """Return the totals of a saved state.

    Raises:
        InvalidArgumentError: if ``saved`` is not a valid result of :meth:`LogicalCounters.state_dict`.
    """
    try:
        return convert(saved[_FORMAT], Totals)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArgumentError("state", str(saved)[:40], _REMEDY) from error
