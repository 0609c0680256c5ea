"""Source that records the value of a ``torchmetrics.Metric``.

The states of the metric are copied to the host asynchronously, and ``compute()`` runs on the host.
"""

import copy
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from delta_tracker.buffers.cuda_fence import StreamFence
from delta_tracker.buffers.host_copy import HostCopy
from delta_tracker.errors import InvalidArgumentError, import_optional
from delta_tracker.monitor.monitor import MONITOR, Monitor
from delta_tracker.monitor.polled_stats import MetricSource


class TorchMetric(MetricSource):
    """Source that records the value of a torchmetrics metric in a gauge at each collection.

    The value covers only the updates of this rank. It is computed on a copy of the metric that never synchronizes
    ranks, regardless of the metric's ``sync_on_compute``, ``dist_sync_fn`` and process group. Integers are recorded
    without rounding. A metric whose ``compute`` calls a collective by itself is not supported, because the collective
    would run in a thread of the monitor.

    Call :meth:`update` and :meth:`reset` of this object, not of the metric, so that the copied states are consistent.
    :meth:`update` detaches the tensors that are passed to it, and copies those that the metric would keep.
    If the metric's ``update`` waits for the device, :meth:`update` also waits. To avoid the wait, use
    :class:`~delta_tracker.monitor.device.metrics.DeviceMean` or
    :class:`~delta_tracker.monitor.device.classification.DeviceClassification`.

    The monitor holds only a weak reference to this object. An object that is deleted is read once more and freed.
    Objects with the same name record in the same gauge.

    Args:
        name: name of the gauge.
        metric: the metric. Its ``compute`` must return one number or a dict of numbers. The gauge's label ``figure`` is
            the key of the dict, or ``value`` for one number.
        monitor: monitor of the gauge, by default the program's default monitor.

    Raises:
        InvalidArgumentError: if ``metric`` is not a ``torchmetrics.Metric``, has no states, or contains other metrics.
        MissingExtraError: if torchmetrics is not installed.
    """

    def __init__(self, name: str, metric: Any, *, monitor: Monitor = MONITOR) -> None:  # noqa: ANN401  torchmetrics has no types here
        self.name = name
        self.metric = metric
        self._states = states = partial(_states_of, metric, _state_names(metric))
        self._lock = threading.RLock()
        self._host = _copy_without_sync(metric)
        self._gauge = monitor.gauge(name, f"{type(metric).__name__} of torchmetrics.", labels=("figure",))
        self._num_updates = 0
        self._num_read = 0
        self._pending: dict[str, Any] | None = None  # copies of the states by name
        self._fence = StreamFence(lambda: tree_leaves(states()))  # holds no reference to this object
        self._reader = _Reader(self)
        monitor.registry.add_source(self._reader)

    def __del__(self) -> None:
        """Pass the object to the reader, if there are updates that were not recorded."""
        reader = getattr(self, "_reader", None)  # None if the constructor raised
        if reader is not None and self.has_news:
            reader.deleted = self

    def update(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  arguments of the metric
        """Call the metric's ``update`` with the given arguments.

        Raises InvalidArgumentError, and records nothing, if the call has changed a value that is not one of the
        metric's states, because copies of the metric have only the states.
        """
        (args, kwargs), passed = _detached((args, kwargs))
        with self._lock:
            outside = _outside(self.metric)
            lengths = {name: len(state) for name, state in self._states().items() if isinstance(state, list)}
            self._enter()
            self.metric.update(*args, **kwargs)
            self._enter()  # the first update may have moved the states to the device of its arguments
            _check_unchanged(self.name, outside, _outside(self.metric))
            self._copy_kept(passed, lengths)
            self._num_updates += 1

    def reset(self) -> None:
        """Reset the metric and drop the pending copy, for example at the end of an epoch."""
        with self._lock:
            self._enter()
            self.metric.reset()
            self._num_updates = self._num_read = 0
            self._pending = None

    def read(self, *, is_last: bool) -> None:
        """Record the value if a copy of the states is complete.

        If no copy is pending and the states have changed, first start a copy. Waits for the device only if ``is_last``
        is True.
        """
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None and self._num_updates > self._num_read:
                self._num_read = self._num_updates
                pending = tree_map(self._to_host, self._states())
            if pending is None:
                return
            if not is_last and any(each.is_running for each in tree_leaves(pending)):
                self._pending = pending
                return
            states = tree_map(HostCopy.result, pending)
        for name, state in states.items():
            setattr(self._host, name, state)
        self._host._computed = None  # noqa: SLF001  its cache
        # With a count of 0, compute() warns that update() was never called.
        self._host._update_count = max(self._num_updates, 1)  # noqa: SLF001
        self._record(self._host.compute())

    def compute(self) -> Any:  # noqa: ANN401  value of the metric
        """Return the result of the metric's ``compute()``, by default the value over the updates of all ranks.

        torchmetrics then synchronizes the states, so every rank must call this method. It waits for the device and for
        the other ranks, and hangs if a state that is a list is empty on some ranks only. Call it instead of the
        metric's own ``compute()``: the collector waits meanwhile, so that it does not copy the states of all ranks.
        """
        with self._lock:
            self._enter()
            return self.metric.compute()

    @property
    def has_news(self) -> bool:
        """True if there are updates that were not recorded."""
        return self._pending is not None or self._num_updates > self._num_read

    def after_fork(self) -> None:
        """Replace the locks and drop the pending copy. Called in a forked child."""
        self._lock = threading.RLock()
        self._pending = None

    def _copy_kept(self, passed: Sequence[Tensor], lengths: Mapping[str, int]) -> None:
        """Copy the states that share memory with an argument of ``update``. ``lengths`` are previous list lengths."""
        memory = {each.untyped_storage().data_ptr() for each in passed if each.numel()}
        if not memory:
            return
        for name, state in self._states().items():
            if isinstance(state, list):
                for index in range(lengths.get(name, 0), len(state)):
                    if state[index].untyped_storage().data_ptr() in memory:
                        state[index] = state[index].clone()
            elif state.untyped_storage().data_ptr() in memory:
                setattr(self.metric, name, state.clone())

    def _to_host(self, state: Tensor) -> HostCopy:
        """Start to copy a state to the host. On CUDA, the copy runs on the stream that last updated the metric."""
        with torch.cuda.stream(self._fence.last_stream(state.device)):
            return HostCopy(state.detach() if state.device.type == "cuda" else state.detach().clone())

    def _enter(self) -> None:
        """Order the next work of the current streams on the states after the work of earlier updates."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # saves 5 us if no state can be on a GPU
            # The newest tensor of a list is enough: it takes long to look at all of them.
            newest = [state[-1:] if isinstance(state, list) else state for state in self._states().values()]
            self._fence.guard(each.device for each in tree_leaves(newest))
            self._fence.enter()

    def _record(self, value: Tensor | float | Mapping[str, Tensor | float]) -> None:
        figures = value if isinstance(value, Mapping) else {"value": value}
        for figure, number in figures.items():
            if isinstance(number, Tensor) and number.numel() != 1:
                remedy = "Use an average, so that compute() returns one number or a dict of numbers"
                raise InvalidArgumentError("metric", f"{self.name}: {figure} {tuple(number.shape)}", remedy)
            # A float would round integers beyond 2**53.
            self._gauge.cell(figure=figure).add(number.item() if isinstance(number, Tensor) else number)


class _Reader(MetricSource):
    """Source that reads a :class:`TorchMetric` until the object is deleted and its last updates are recorded.

    Attributes:
        deleted: the object, after it was deleted with updates that were not recorded.
    """

    if_taken = "number"

    def __init__(self, metric: TorchMetric) -> None:
        self.name = metric.name
        self.deleted: TorchMetric | None = None
        self._metric = weakref.ref(metric)

    @property
    def is_over(self) -> bool:
        """True if the object was deleted and its last updates are recorded."""
        return self._metric() is None and self.deleted is None

    def read(self, *, is_last: bool) -> None:
        """Read the object. Free it if it was deleted and its last updates are recorded, or if it raises."""
        metric = self._metric() or self.deleted
        try:
            if metric is not None:
                metric.read(is_last=is_last)
        except BaseException:
            self.deleted = None
            raise
        if metric is None or not metric.has_news:
            self.deleted = None

    def after_fork(self) -> None:
        """Prepare the object for use in a forked child. Free it if it was deleted."""
        self.deleted = None
        metric = self._metric()
        if metric is not None:
            metric.after_fork()


def _state_names(metric: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Return a metric's state names. Raise InvalidArgumentError if it has none, or contains other metrics."""
    torchmetrics = import_optional("torchmetrics", "torchmetrics", "torchmetrics")
    if not isinstance(metric, torchmetrics.Metric):
        raise InvalidArgumentError("metric", type(metric).__name__, "Pass one torchmetrics.Metric")
    # In submodules, and in the lists, tuples and dicts of the attributes.
    parts = [each for module in metric.modules() for each in tree_leaves(vars(module)) if each is not metric]
    inner = dict.fromkeys(type(each).__name__ for each in parts if isinstance(each, torchmetrics.Metric))
    reductions: Mapping[str, Any] = metric._reductions  # noqa: SLF001  no public equivalent
    if inner or not reductions:
        remedy = f"Pass a metric with states and without inner metrics; inner metrics: {', '.join(inner) or 'none'}"
        raise InvalidArgumentError("metric", type(metric).__name__, remedy)
    return tuple(reductions)


def _states_of(metric: Any, names: Iterable[str]) -> dict[str, Tensor | list[Tensor]]:  # noqa: ANN401
    return {name: getattr(metric, name) for name in names}


def _detached(arguments: tuple[Any, Any]) -> tuple[tuple[Any, Any], list[Tensor]]:
    """Return a copy of ``arguments`` in which each tensor is detached, and a list of these tensors."""
    leaves, structure = tree_flatten(arguments)
    leaves = [each.detach() if isinstance(each, Tensor) else each for each in leaves]
    return tree_unflatten(leaves, structure), [each for each in leaves if isinstance(each, Tensor)]


_PLAIN_TYPES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


@cache
def _own_names() -> frozenset[str]:
    """Return the names of the attributes that torchmetrics itself sets on every metric."""
    import torchmetrics  # noqa: PLC0415  checked in the constructor

    return frozenset(vars(torchmetrics.SumMetric()))


def _outside(metric: Any) -> dict[str, tuple[object, object]]:  # noqa: ANN401
    """Return each attribute and buffer that is not a state, with a number that grows if its content changes."""
    left_out = _own_names() | metric._reductions.keys()  # noqa: SLF001
    values = {**vars(metric), **metric._buffers}  # noqa: SLF001
    return {name: (value, _edition(value)) for name, value in values.items() if name not in left_out}


def _edition(value: object) -> int:
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version  # noqa: SLF001  no public equivalent
    return len(value) if isinstance(value, list | dict | set) else 0


def _check_unchanged(
    name: str, before: Mapping[str, tuple[object, object]], after: Mapping[str, tuple[object, object]]
) -> None:
    """Raise InvalidArgumentError if two results of :func:`_outside` differ. ``name`` is the name of the gauge."""
    missing = (_check_unchanged, 0)
    for key, (value, edition) in after.items():
        old, old_edition = before.get(key, missing)
        is_same = value is old or (isinstance(value, _PLAIN_TYPES) and type(value) is type(old) and value == old)
        if not is_same or edition != old_edition:
            remedy = f"Declare {key!r} with add_state(): its update() changes it"
            raise InvalidArgumentError("metric", name, remedy)


def _copy_without_sync(metric: Any) -> Any:  # noqa: ANN401
    """Return a copy of ``metric`` on the host whose ``compute`` returns this rank's value without a collective.

    torchmetrics copies the attribute ``sync_on_compute`` to ``_to_sync`` in the constructor and in ``reset``.
    Therefore, both attributes are set to False.
    """
    # Process groups cannot be copied.
    left_out = (metric.process_group, metric.dist_sync_fn, metric.distributed_available_fn)
    host = copy.deepcopy(metric, {id(each): None for each in left_out}).to("cpu")
    host.process_group = host.dist_sync_fn = None
    host.distributed_available_fn = lambda: False
    host.sync_on_compute = host.dist_sync_on_step = host._to_sync = False  # noqa: SLF001
    return host
