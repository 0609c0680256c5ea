"""Stats that accumulate values on a device. Recording does not wait for the device.

A value may be a Python number or a tensor of any shape on any device. Values that are not finite are ignored and
counted as rejected. They are detected on the device. The sums are recorded after they have been copied to the host, so
a window with ``Window(count=...)`` may contain more than ``count`` records.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.aggregate import Aggregate
from delta_tracker.monitor.device.device_state import DeviceReader, DeviceState, EpochEnd, sum_dtype
from delta_tracker.monitor.monitor import MONITOR, Monitor
from delta_tracker.monitor.stat import Stat

_HOST = torch.device("cpu")


def reader_of(monitor: Monitor) -> DeviceReader:
    """Return the source that reads the device states of ``monitor``. The source is created if it does not exist."""
    for source in monitor.registry.sources:
        if isinstance(source, DeviceReader):
            return source
    reader = DeviceReader(monitor.registry.progress)
    monitor.registry.add_source(reader)
    return reader


class _DeviceStat(DeviceState):
    """Base class of stats that accumulate on a device. Each instance records in one cell with fixed label values."""

    definer: ClassVar[Callable[..., Stat]] = Monitor.stat
    is_signed: ClassVar[bool] = True  # False to reject negative values
    num_sums = 4
    _defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        name: str,
        help: str = "",  # noqa: A002  the usual term
        *,
        monitor: Monitor = MONITOR,
        labels: Mapping[str, object] | None = None,
        **options: Any,  # noqa: ANN401  as in Monitor.stat
    ) -> None:
        labels = labels or {}
        if not isinstance(labels, Mapping):
            raise InvalidArgumentError("labels", labels, "Pass a mapping of label to value, for one set of labels")
        stat = type(self).definer(monitor, name, help, labels=tuple(labels), **{**self._defaults, **options})
        super().__init__(reader_of(monitor))
        self._cell = stat.cell(**labels)
        self._cell.is_remote = True

    @property
    def enabled(self) -> bool:
        """True if values are recorded."""
        return self._cell.enabled

    def _refuse_labels(self, labels: Mapping[str, object]) -> None:
        if labels:
            kind, held = type(self).__name__, dict(self._cell.labels)
            remedy = f"Build one {kind} for each set of labels, with labels={labels}. This one has {held or 'none'}"
            raise InvalidArgumentError("labels", labels, remedy)

    def _record(self, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add values to the sums; see :meth:`DeviceMean.update`. No-op if the stat is disabled."""
        if not self.enabled:
            return
        if isinstance(value, Tensor):
            self._record_tensor(value.detach(), weight.detach() if isinstance(weight, Tensor) else weight)
        elif isinstance(weight, Tensor):
            weight = weight.detach()
            self._record_tensor(torch.full_like(weight, value, dtype=sum_dtype(weight.device)), weight)
        else:
            weighted = float(value) * float(weight)
            is_good = math.isfinite(weighted) and (self.is_signed or weighted >= 0)
            sums = (weighted, float(weight), 1.0, 1.0) if is_good else (0.0, 0.0, 0.0, 1.0)
            self._add(_HOST, torch.tensor(sums, dtype=torch.float64, device="cpu"))

    def _record_tensor(self, value: Tensor, weight: Tensor | float) -> None:
        _check(value, weight)
        dtype = sum_dtype(value.device)
        if isinstance(weight, Tensor) and weight.device != value.device:
            weight = weight.item()  # a number on the host, which where() would copy to the device and wait
        if not isinstance(weight, Tensor):
            # As an operand of where(), a number would have the default dtype. full() copies nothing from the host.
            weight = torch.full((), weight, dtype=dtype, device=value.device)
        weighted = value.to(dtype) * weight
        is_good = weighted.isfinite() if self.is_signed else weighted.isfinite() & (weighted >= 0)
        sums = (
            torch.where(is_good, weighted, 0).sum(dtype=dtype),
            torch.where(is_good, weight, 0).sum(dtype=dtype),
            is_good.sum(dtype=dtype),
            torch.full((), value.numel(), dtype=dtype, device=value.device),
        )
        self._add(value.device, torch.stack(sums))

    def figures(self, sums: list[float]) -> Aggregate:
        """Convert ``sums`` (total, weight, number of accepted values, number of values) to an aggregate."""
        total, weight, count, num_values = sums
        result = Aggregate()
        result.total, result.weight, result.count = total, weight, round(count)
        result.num_rejected = round(num_values) - result.count
        return result

    def record_growth(self, growth: list[float], epoch_end: EpochEnd | None) -> None:
        """Record the values added between two readings of the sums."""
        self._cell.merge(self.figures(growth))
        if epoch_end is not None:
            self._cell.end_epoch(epoch_end)


class DeviceMean(_DeviceStat):
    """Stat that computes the weighted mean of values on a device: sum(value * weight) / sum(weight).

    Args:
        name: unique name; dots separate namespaces.
        help: description of the stat in one sentence.
        monitor: monitor that records the stat.
        labels: label values by name; None for no labels.
        options: same as in :meth:`~delta_tracker.monitor.monitor.Monitor.stat`. The default aggregations are ``mean``
            and ``count``.

    Raises:
        InvalidArgumentError: for an invalid name, a name registered with a different definition, or an unknown option.

    Example:
        >>> monitor = Monitor()
        >>> loss = DeviceMean("training.loss", monitor=monitor, aggregations=("mean", "count"))
        >>> loss.update(torch.tensor([1.0, 3.0]), weight=torch.tensor([3.0, 1.0]))
        >>> [report.values for report in monitor.collect().windows]
        [{'mean': 1.5, 'count': 2}]
    """

    _defaults: ClassVar[Mapping[str, Any]] = {"aggregations": ("mean", "count")}

    def update(self, value: Tensor | float, weight: Tensor | float = 1.0, **labels: object) -> None:
        """Record values. No-op if the stat is disabled.

        Args:
            value: tensor of any shape and real dtype, or a number.
            weight: number, or tensor that can be broadcast to ``value``. If ``value`` is a number and ``weight`` is a
                tensor, ``value`` is added once for each element of ``weight``.
            labels: not supported; pass ``labels`` to the constructor.

        Raises:
            InvalidArgumentError: if ``labels`` or complex values are passed, or if ``weight`` cannot be broadcast to
                ``value`` or is on another device. A zero-dimensional ``weight`` may always be on the CPU.
        """
        self._refuse_labels(labels)
        self._record(value, weight)


class DeviceSum(DeviceMean):
    """Stat that computes the weighted sum of values on a device: sum(value * weight).

    The arguments are the same as in :class:`DeviceMean`. The default aggregations are ``sum`` and ``count``.
    """

    _defaults: ClassVar[Mapping[str, Any]] = {"aggregations": ("sum", "count")}


class DeviceCounter(_DeviceStat):
    """Counter whose total accumulates on a device. Values are increments. Negative values are rejected.

    The arguments are the same as in :class:`DeviceMean`. ``options`` are passed to
    :meth:`~delta_tracker.monitor.monitor.Monitor.counter`.
    """

    definer: ClassVar[Callable[..., Stat]] = Monitor.counter
    is_signed: ClassVar[bool] = False

    def update(self, value: Tensor | float = 1, **labels: object) -> None:
        """Add increments to the total. No-op if the counter is disabled.

        Args:
            value: tensor of any shape and real dtype, or a number. The total of integers is exact up to 2**53, or up to
                2**24 on MPS.
            labels: not supported; pass ``labels`` to the constructor.

        Raises:
            InvalidArgumentError: if ``labels`` or complex values are passed.
        """
        self._refuse_labels(labels)
        self._record(value)

    def figures(self, sums: list[float]) -> Aggregate:
        """Convert ``sums`` to an aggregate. The total is an int if it has no fractional part."""
        result = super().figures(sums)
        result.total = int(sums[0]) if sums[0].is_integer() else sums[0]
        return result


def _check(value: Tensor, weight: Tensor | float) -> None:
    if value.is_complex():
        raise InvalidArgumentError("value", value.dtype, "Pass real numbers")
    if isinstance(weight, Tensor):
        is_scalar_on_host = weight.dim() == 0 and weight.device.type == "cpu"
        if weight.device != value.device and not is_scalar_on_host:
            raise InvalidArgumentError("weight", weight.device, f"Move it to {value.device}, the device of the values")
        pairs = zip(reversed(weight.shape), reversed(value.shape), strict=False)
        if weight.dim() > value.dim() or any(w not in (1, v) for w, v in pairs):
            remedy = f"Pass a shape that broadcasts to {tuple(value.shape)}"
            raise InvalidArgumentError("weight", tuple(weight.shape), remedy)
