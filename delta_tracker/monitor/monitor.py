"""Monitor: the entry point for defining, recording, configuring and collecting metrics and events."""

import atexit
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

from delta_tracker.arguments import check_count, check_function
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.live_objects import Forkable, protect
from delta_tracker.monitor.clock import Clock, Progress
from delta_tracker.monitor.collection_report import CollectionReport
from delta_tracker.monitor.collector import Collector
from delta_tracker.monitor.event import Event, Severity, Span, Value, launched_run_id, renew_ids, trace_of
from delta_tracker.monitor.event_log import EventLog, EventRule, Handler, Subscription
from delta_tracker.monitor.library import LibraryMetrics
from delta_tracker.monitor.names import check_label_names, encodable
from delta_tracker.monitor.polled_stats import MetricSource, Passive, Readings
from delta_tracker.monitor.registry import Registry
from delta_tracker.monitor.sinks.base_sink import Sink
from delta_tracker.monitor.stat import Counter, Definition, Gauge, Histogram, Kind, Stat
from delta_tracker.monitor.system import SystemMetrics

_INTERVAL = timedelta(seconds=10)
_RULES = tuple(EventRule.__dataclass_fields__)
_OPTIONS = Definition.__dataclass_fields__.keys() - {"name", "kind", "help"}


class Monitor(Forkable):
    """Entry point for recording metrics and events and delivering them to sinks. Thread-safe.

    Metrics (called stats) and events can be recorded at any time. :meth:`start` starts two threads: one collects
    periodically, and the other calls sinks, event handlers and callbacks of stats. :meth:`stop` collects once more. It
    is also called at exit. In a forked child, the monitor stops and discards all records, events and sinks.

    Args:
        clock: source of timestamps.
        capacity: maximum number of events in each queue. The collector, each sink and each handler have
            separate queues.
        deadline: time limit for each call to a sink, handler or callback. After a call exceeds the limit, the sink,
            handler or callback is not called for at least 10 seconds.

    Example:
        >>> monitor = Monitor()
        >>> loss = monitor.stat("training.loss", "Loss of a batch.", aggregations=("mean",))
        >>> loss.add(3.0)
        >>> loss.add(1.0)
        >>> [(report.count, report.values) for report in monitor.collect().windows]
        [(2, {'mean': 2.0})]
    """

    def __init__(
        self, clock: Clock = time, *, capacity: int = 4096, deadline: timedelta = timedelta(seconds=5)
    ) -> None:
        self._clock = clock
        self._run_id: str | None = None
        self._progress = Progress(clock)
        self.registry = Registry(self._progress, self._overflowed)
        self.metrics = LibraryMetrics(self.registry)
        self.events = EventLog(clock, capacity, self._dropped, lambda: self._collector.wake())  # noqa: PLW0108  it is created next
        seconds = _seconds("deadline", deadline)
        self._collector = Collector(self.registry, self.events, self.metrics, deadline_seconds=seconds)

    # Stats

    def counter(self, name: str, help: str = "", **options: Any) -> Counter:  # noqa: A002, ANN401
        """Define and return a counter: a total that only increases. The arguments are the same as in :meth:`stat`.

        Pass ``is_logical=True`` if the counter describes the training run rather than the process. Logical counters are
        saved in checkpoints; see :mod:`~delta_tracker.monitor.state`.
        """
        return cast("Counter", self._define(Kind.COUNTER, name, help, options))

    def gauge(self, name: str, help: str = "", **options: Any) -> Gauge:  # noqa: A002, ANN401
        """Define and return a gauge: a value that can go up and down. The arguments are the same as in :meth:`stat`."""
        return cast("Gauge", self._define(Kind.GAUGE, name, help, options))

    def histogram(self, name: str, help: str = "", **options: Any) -> Histogram:  # noqa: A002, ANN401
        """Define and return a histogram, which reports quantiles. The arguments are the same as in :meth:`stat`."""
        return cast("Histogram", self._define(Kind.HISTOGRAM, name, help, options))

    def stat(self, name: str, help: str = "", **options: Any) -> Stat:  # noqa: A002, ANN401  the usual term
        """Define and return a stat of samples, such as losses.

        A second call with the same definition returns the same stat.

        Args:
            name: unique name; dots separate namespaces.
            help: description of the stat in one sentence.
            options: ``unit``, ``labels``, ``max_cells`` and ``bounds`` of
                :class:`~delta_tracker.monitor.stat.Definition`, and fields of
                :class:`~delta_tracker.monitor.policy.Policy`, for example ``aggregations`` and ``window``.

        Raises:
            InvalidArgumentError: for an invalid name or option, or if ``name`` is already defined differently.
        """
        return self._define(Kind.STAT, name, help, options)

    def passive(
        self,
        name: str,
        callback: Callable[[], Readings],
        help: str = "",  # noqa: A002
        *,
        kind: Kind = Kind.GAUGE,
        **options: Any,  # noqa: ANN401
    ) -> Stat:
        """Define and return a stat whose values come from a callback.

        The callback is called once per collection, in a thread of the library.

        Args:
            name: unique name; dots separate namespaces.
            callback: function that returns a number, a mapping of label values to numbers, or None for no data. With
                several labels, the keys are tuples of label values. For a counter, the numbers are running totals.
            help: description of the stat in one sentence.
            kind: kind of the stat, such as ``Kind.GAUGE``.
            options: the same options as in :meth:`stat`.

        Raises:
            InvalidArgumentError: for an invalid name or option, or if ``name`` is already defined differently or
                already has a callback.
        """
        check_function("callback", callback, "queue.qsize")
        stat = self._define(kind, name, help, options)
        self.registry.add_source(Passive(stat, callback))
        return stat

    def add_source(self, source: MetricSource) -> None:
        """Add a source of metrics. The source is read once per collection, in a thread of the library.

        Raises InvalidArgumentError if ``source`` is not a MetricSource.
        """
        if not isinstance(source, MetricSource):
            raise InvalidArgumentError("source", source, "Pass a MetricSource, or call passive(name, callback)")
        protect(self)
        self.registry.add_source(source)

    def configure(self, pattern: str, **settings: Any) -> list[str]:  # noqa: ANN401
        """Change the policy of all matching stats; see :meth:`~delta_tracker.monitor.registry.Registry.configure`."""
        return self.registry.configure(pattern, **settings)

    def find(self, pattern: str = "*", *, kind: Kind | None = None) -> list[Stat]:
        """Return the stats whose names match a shell pattern, sorted by name.

        Args:
            pattern: shell pattern of names, such as ``training.*``.
            kind: kind of the stats to return; None for all kinds.
        """
        return self.registry.find(pattern, kind=kind)

    # Events

    def log(self, name: str, message: str = "", /, **data: Value) -> None:
        """Emit an event of severity INFO.

        Args:
            name: type of the event; dots separate namespaces.
            message: human-readable description.
            data: values by name, each a str, int, float or bool.

        Raises:
            InvalidArgumentError: for an invalid name, or a value of an unsupported type.
        """
        self.emit(Event(name, message, data, time_ns=self._clock.time_ns(), monotonic_ns=self._clock.monotonic_ns()))

    def emit(self, event: Event) -> None:
        """Queue an event for delivery, or drop it if a limit set with :meth:`limit_events` rejects it.

        Raises InvalidArgumentError if ``event`` is not an Event.
        """
        if not isinstance(event, Event):
            raise InvalidArgumentError("event", event, "Pass an Event, or call log(name, message)")
        protect(self)
        self.events.emit(event)

    def span(
        self, name: str, /, *, severity: Severity = Severity.INFO, trace: int | None = None, **data: Value
    ) -> Span:
        """Return a span: a timed section of the program that emits an event when it starts and another when it ends.

        Use the span as a context manager, or call its methods ``start()`` and ``stop()``.

        Args:
            name: name of both events.
            severity: severity of both events. The end event has severity ERROR if the body of the ``with``
                statement raises.
            trace: number, for example the step. Spans with the same number belong to the same trace. If all ranks pass
                the same ``run_id`` to :meth:`start`, this includes spans of different ranks. None to use the trace of
                the enclosing span, or a new trace if there is no enclosing span.
            data: values by name, stored in both events.
        """
        trace_id = None if trace is None else trace_of(self._run(), trace)
        return Span(self.emit, self._clock, name, data, severity, trace_id)

    def on(self, pattern: str, handler: Handler, severity: Severity = Severity.DEBUG) -> Subscription:
        """Subscribe a handler to events. The handler is called in a thread of the library.

        Args:
            pattern: shell pattern of event names.
            handler: function that is called with each matching event.
            severity: minimum severity of the events.

        Returns:
            The subscription. Call its ``remove()`` to unsubscribe the handler.

        Raises InvalidArgumentError if ``handler`` is not callable.
        """
        check_function("handler", handler, "lambda event: print(event.message)")
        return self.events.subscribe(pattern, handler, severity)

    def limit_events(self, pattern: str, **rule: Any) -> None:  # noqa: ANN401  the fields of EventRule
        """Set limits for events whose names match a shell pattern: a minimum severity, a rate or a sampling fraction.

        If several patterns match a name, only the limits of the most recent call apply.

        Args:
            pattern: shell pattern of event names.
            rule: fields of :class:`~delta_tracker.monitor.event_log.EventRule`, for example ``per_second=10``.

        Raises InvalidArgumentError for an unknown field or an invalid value.
        """
        for field in rule.keys() - _RULES:
            raise InvalidArgumentError("rule", field, f"Pass some of {', '.join(_RULES)}")
        self.events.rule(pattern, EventRule(**rule))

    # Progress

    def step(self, number: int | None = None) -> None:
        """Set the training step that windows report. If ``number`` is None, increment the step by 1.

        Raises InvalidArgumentError if ``number`` is neither None nor a nonnegative integer.
        """
        if number is not None:
            check_count("number", number, least=0)
        self._progress.step = (self._progress.step or 0) + 1 if number is None else number

    def end_epoch(self, number: int | None = None) -> None:
        """End an epoch: close the windows of all stats whose policy has ``Window(epoch=True)``.

        ``number`` is the number of the epoch; None for the previous number plus 1. Raises InvalidArgumentError if
        ``number`` is neither None nor a nonnegative integer.
        """
        if number is not None:
            check_count("number", number, least=0)
        self._progress.epoch = (self._progress.epoch or 0) + 1 if number is None else number
        for source in self.registry.sources:
            source.end_epoch()
        for stat in self.registry.find():
            stat.end_epoch()

    # Collecting

    @property
    def is_running(self) -> bool:
        """True between :meth:`start` and :meth:`stop`."""
        return self._collector.is_running

    def start(
        self,
        sinks: Sequence[Sink] = (),
        *,
        interval: timedelta = _INTERVAL,
        attributes: Mapping[str, str] | None = None,
        system: bool = True,
        run_id: str | None = None,
    ) -> None:
        """Start threads that collect every ``interval`` until :meth:`stop` is called or the program exits.

        The last collection is lost if the program is killed or calls ``os._exit``. Child processes of multiprocessing
        end with ``os._exit``, so they must call :meth:`stop`.

        Args:
            sinks: sinks to which reports of stats and events are delivered.
            interval: time between two collections.
            attributes: names and values that identify the process, such as ``{"rank": "0"}``. Sinks export them.
            system: True to also record CPU time and memory of the process, and torch's CUDA memory.
            run_id: id of the training run. Pass the same id on all ranks, and a new id for each run, so that spans of
                different ranks can share a trace. None to use the environment variable ``TORCHELASTIC_RUN_ID`` or
                ``SLURM_JOB_ID``, or a random id if neither is set.

        Raises:
            InvalidArgumentError: if the monitor is running, ``interval`` is 0 or less, a sink is not a
                :class:`~delta_tracker.monitor.sinks.base_sink.Sink`, ``attributes`` is not a mapping, or an attribute
                has an invalid name.
            RuntimeError: if no thread can be started.
        """
        seconds = _seconds("interval", interval)
        _check_sinks(sinks)
        if not isinstance(attributes or {}, Mapping):
            raise InvalidArgumentError("attributes", attributes, "Pass a mapping of name to text")
        texts = [encodable(str(value)) for value in (attributes or {}).values()]
        labels = dict(zip(check_label_names(attributes or {}), texts, strict=True))
        if self.is_running:
            raise InvalidArgumentError("start", "twice", "Call stop() first")
        self._run_id = self._run_id if run_id is None else run_id
        if system:
            self.registry.add_source(SystemMetrics(self.registry))
        protect(self)
        atexit.register(self.stop)
        self._collector.start(sinks, seconds, labels)

    def stop(self, timeout: timedelta = timedelta(seconds=15)) -> bool:
        """Collect one last time, close the sinks and stop the threads. Return False if this exceeds ``timeout``.

        No-op if the monitor is not running. Raises InvalidArgumentError if ``timeout`` is not a timedelta above 0.
        """
        seconds = _seconds("timeout", timeout)
        atexit.unregister(self.stop)
        return self._collector.stop(seconds)

    def flush(self, timeout: timedelta = timedelta(seconds=15)) -> bool:
        """Collect now and wait until the sinks have been called. Return False if this takes longer than ``timeout``.

        Raises InvalidArgumentError if ``timeout`` is not a timedelta above 0.
        """
        return self._collector.flush(_seconds("timeout", timeout))

    def collect(self) -> CollectionReport:
        """Collect now and return the report. Use it in tests, and in programs that do not call :meth:`start`."""
        return self._collector.collect()

    def after_fork_in_child(self) -> None:
        """Discard all records, events and sinks, and mark the monitor as stopped. Called in a forked child."""
        renew_ids()
        atexit.unregister(self.stop)
        failed = self.registry.reset()
        self.events.reset()
        self._collector.after_fork()
        for source in failed:
            self.metrics.outlet_errors.cell(outlet=source.name).add(1)

    def _run(self) -> str:
        if self._run_id is None:
            self._run_id = launched_run_id()
        return self._run_id

    def _define(self, kind: Kind, name: str, text: str, options: dict[str, Any]) -> Stat:
        protect(self)
        defined = {key: options.pop(key) for key in _OPTIONS if key in options}
        return self.registry.define(Definition(name=name, kind=kind, help=text, **defined), **options)

    def _overflowed(self, stat: str) -> None:
        if stat != self.metrics.label_overflows.name:
            self.metrics.label_overflows.cell(stat=stat).add(1)

    def _dropped(self, reason: str) -> None:
        self.metrics.dropped_events.cell(reason=reason).add(1)


def _check_sinks(sinks: object) -> None:
    if not isinstance(sinks, Iterable) or not all(isinstance(sink, Sink) for sink in sinks):
        raise InvalidArgumentError("sinks", sinks, "Pass a list of sinks, for example [JsonlSink(path)]")


def _seconds(argument: str, duration: timedelta) -> float:
    if type(duration) is not timedelta or duration <= timedelta(0):
        raise InvalidArgumentError(argument, duration, "Pass a timedelta above 0")
    return duration.total_seconds()


MONITOR = Monitor()
"""Default monitor of the program, used unless another monitor is passed."""


def program_monitor() -> Monitor:
    """Return the default monitor of the program.

    Outside the package ``monitor``, call this function or use a ``Recorder`` instead of importing :data:`MONITOR`.
    """
    return MONITOR
