"""Reads a ``torchmetrics.Metric``: its states are copied without a wait, its value is computed on the host."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker.errors import InvalidArgumentError, MissingExtraError
from delta_tracker.monitor.default import MONITOR
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.source import Source

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda stacked: stacked.sum(dim=0),
    "max": lambda stacked: stacked.amax(dim=0),
    "min": lambda stacked: stacked.amin(dim=0),
}

_Copies = dict[str, Tensor | list[Tensor]]


class TorchMetric(Source):
    """Records the value of a metric at each collection, as a gauge.

    Call :meth:`update` and :meth:`reset` here, not on the metric, so that no reading falls between two of its states.
    What the metric's own ``update`` waits for, this one waits for too: see :class:`~delta_tracker.monitor.device.
    DeviceMean` and :class:`~delta_tracker.monitor.classification.DeviceClassification` for some that do not.

    Args:
        name: of the gauge.
        metric: whose states all reduce over ranks by sum, max, min or cat; its ``compute`` gives one number, or a dict
            of such, which become the label ``figure``.
        monitor: whose gauge; the program's if not given.

    Raises:
        InvalidArgumentError: if a state reduces in another way, which a sum of parts could not reproduce.
        MissingExtraError: if torchmetrics is not installed.
    """

    def __init__(self, name: str, metric: Any, *, monitor: Monitor = MONITOR) -> None:  # noqa: ANN401  torchmetrics has no types here
        self.name = name
        self.metric = metric
        self._reductions = _reductions(metric)
        self._lock = threading.RLock()
        self._host = copy.deepcopy(metric).to("cpu")
        # Its value is this rank's: without this, compute() would wait for the other ranks.
        self._host.sync_on_compute = False
        self._gauge = monitor.gauge(name, f"{type(metric).__name__} of torchmetrics.", labels=("figure",))
        self._num_updates = 0
        self._num_read = 0
        self._pending: tuple[_Copies, Any] | None = None
        monitor.registry.add_source(self)

    def update(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  the metric's own
        """Update the metric."""
        with self._lock:
            self.metric.update(*args, **kwargs)
            self._num_updates += 1

    def reset(self) -> None:
        """Reset the metric, as at the end of an epoch."""
        with self._lock:
            self.metric.reset()
            self._num_updates = self._num_read = 0
            self._pending = None

    def read(self, *, is_last: bool) -> None:
        """Record the value as of the last copy of the states, then start the next copy."""
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None and self._num_updates > self._num_read:
                pending = self._start_copies()
            if pending is None:
                return
            states, event = pending
            if event is not None and is_last:
                event.synchronize()
            elif event is not None and not event.query():
                self._pending = pending
                return
        self._record(self.value_of(states))

    def value_of(self, states: Mapping[str, Tensor | list[Tensor]]) -> Tensor | Mapping[str, Tensor]:
        """What the metric computes of states on the host."""
        for name, state in states.items():
            setattr(self._host, name, state)
        self._host._computed = None  # noqa: SLF001  its cache
        self._host._update_count = max(self._num_updates, 1)  # noqa: SLF001  else it warns that it was never updated
        return cast("Tensor | Mapping[str, Tensor]", self._host.compute())

    def merge_ranks(self, group: dist.ProcessGroup | None = None) -> Tensor | Mapping[str, Tensor]:
        """The value over all ranks, the same on each; every rank must call it. Waits for the device and the ranks.

        One all-gather; with states that concatenate one more, of their sizes. With gloo they go through the host.

        Args:
            group: over which ranks; all of them if not given.
        """
        with self._lock:
            states, event = self._start_copies()
        if event is not None:
            event.synchronize()
        device = torch.device("cpu")
        if dist.get_backend(group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        joined = {name: _joined(state) for name, state in states.items()}
        flat = torch.cat([joined[name].reshape(-1).to(torch.float64) for name in self._reductions]).to(device)
        sizes = torch.tensor([[joined[name].numel() for name in self._reductions]], device=device)
        by_rank = [sizes] * dist.get_world_size(group)
        if "cat" in self._reductions.values():
            by_rank = [torch.empty_like(sizes) for _ in by_rank]
            dist.all_gather(by_rank, sizes, group=group)
        longest = max(int(each.sum()) for each in by_rank)
        padded = torch.nn.functional.pad(flat, (0, longest - len(flat)))
        gathered = [torch.empty_like(padded) for _ in by_rank]
        dist.all_gather(gathered, padded, group=group)
        parts = [
            torch.split(each[: int(counts.sum())].cpu(), counts.flatten().tolist())
            for each, counts in zip(gathered, by_rank, strict=True)
        ]
        return self.value_of(self._reduced(parts, joined))

    def after_fork(self) -> None:
        """Make a lock that nobody holds."""
        self._lock = threading.RLock()
        self._pending = None

    def _reduced(self, parts: Sequence[Sequence[Tensor]], mine: Mapping[str, Tensor]) -> _Copies:
        result: _Copies = {}
        for place, (name, reduction) in enumerate(self._reductions.items()):
            of_ranks = [part[place].to(mine[name].dtype) for part in parts]
            if reduction == "cat":
                whole = torch.cat([each.reshape(-1, *mine[name].shape[1:]) for each in of_ranks])
                result[name] = [whole] if isinstance(getattr(self.metric, name), list) else whole
            else:
                stacked = torch.stack([each.reshape(mine[name].shape) for each in of_ranks])
                result[name] = _REDUCE[reduction](stacked)
        return result

    def _start_copies(self) -> tuple[_Copies, Any]:
        self._num_read = self._num_updates
        copies: _Copies = {}
        devices = set()
        for name in self._reductions:
            state = getattr(self.metric, name)
            devices |= {each.device for each in (state if isinstance(state, list) else [state])}
            copies[name] = [_to_host(each) for each in state] if isinstance(state, list) else _to_host(state)
        if not any(device.type == "cuda" for device in devices):
            return copies, None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return copies, event

    def _record(self, value: Tensor | Mapping[str, Tensor]) -> None:
        figures = value if isinstance(value, Mapping) else {"value": value}
        for figure, number in figures.items():
            if number.numel() != 1:
                remedy = "Use an average, so that compute() gives one number, or a dict of such"
                raise InvalidArgumentError("metric", f"{self.name}: {figure} {tuple(number.shape)}", remedy)
            self._gauge.cell(figure=figure).add(float(number))


def _reductions(metric: Any) -> dict[str, str]:  # noqa: ANN401
    """Name of each state to how it reduces.

    Raises:
        InvalidArgumentError: for one that is none of those known.
    """
    try:
        from torchmetrics.utilities import data  # noqa: PLC0415  optional
    except ModuleNotFoundError as error:
        raise MissingExtraError("torchmetrics", "torchmetrics") from error
    known = {
        data.dim_zero_sum: "sum",
        data.dim_zero_max: "max",
        data.dim_zero_min: "min",
        data.dim_zero_cat: "cat",
    }
    found = {}
    for name, reduction in metric._reductions.items():  # noqa: SLF001  the only place where it stands
        if reduction not in known:
            what = getattr(reduction, "__name__", str(reduction))
            remedy = f"Its state {name!r} reduces by {what}; only sum, max, min and cat can be read in parts"
            raise InvalidArgumentError("metric", type(metric).__name__, remedy)
        found[name] = known[reduction]
    return found


def _joined(state: Tensor | list[Tensor]) -> Tensor:
    """A state that concatenates as one tensor; others as they are."""
    if not isinstance(state, list):
        return state
    return torch.cat([each.reshape(1) if each.dim() == 0 else each for each in state]) if state else torch.empty(0)


def _to_host(state: Tensor) -> Tensor:
    """A copy on the host, which may still be under way."""
    if state.device.type != "cuda":
        return state.detach().to("cpu", copy=True)
    host = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
    return host.copy_(state.detach(), non_blocking=True)
