"""Queue of emitted events, limits on their severity and rate, and subscriptions of event handlers."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from delta_tracker.arguments import check_count
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.clock import NS, Clock
from delta_tracker.monitor.event import Event, Severity
from delta_tracker.monitor.outlets import Guard

Handler = Callable[[Event], None]

# Bounds the memory if a program generates event names, such as names that contain numbers.
_MAX_GATES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRule:
    """Limits on the severity and rate of events. Events outside the limits are dropped.

    Emitting an event takes microseconds, and each event is delivered individually. Emit at most a few events per
    training iteration. Use a stat for values that are recorded more often.

    Args:
        severity: minimum accepted severity.
        per_second: maximum average number of events per second for each event name. Bursts may contain up to ten
            times this number.
        sample: fraction of events to accept. The events are chosen at random.

    Raises:
        InvalidArgumentError: if ``per_second`` is 0 or less, or if ``sample`` is outside (0, 1].
    """

    severity: Severity = Severity.DEBUG
    per_second: float = 1000.0
    sample: float = 1.0

    def __post_init__(self) -> None:
        if not self.per_second > 0:
            raise InvalidArgumentError("per_second", self.per_second, "Pass a number above 0")
        if not 0 < self.sample <= 1:
            raise InvalidArgumentError("sample", self.sample, "Pass a fraction above 0, up to 1")


@dataclass(slots=True)
class _RateLimit:
    """Filter that applies a rule to the events of one name. A token bucket limits their rate."""

    rule: EventRule
    tokens: float = field(init=False)
    refilled_ns: int = 0

    def __post_init__(self) -> None:
        self.tokens = self._burst

    @property
    def _burst(self) -> float:
        return max(1.0, 10 * self.rule.per_second)

    def refusal(self, event: Event, now_ns: int) -> str | None:
        """Return the reason to drop ``event``; None if the event is accepted."""
        if event.severity < self.rule.severity:
            return "severity"
        if self.rule.sample < 1 and random.random() >= self.rule.sample:  # noqa: S311  no secret
            return "sample"
        age = max(now_ns - self.refilled_ns, 0) * NS
        self.tokens, self.refilled_ns = min(self._burst, self.tokens + age * self.rule.per_second), now_ns
        if self.tokens < 1:
            return "rate"
        self.tokens -= 1
        return None


class Subscription:
    """Subscription of a handler to events. Call :meth:`remove` to unsubscribe the handler.

    Args:
        pattern: shell pattern of event names.
        severity: minimum severity of the events.
        handler: function that is called with each matching event.

    Attributes:
        guard: record of the handler's failures. After a failure, the handler is not called for some time.
    """

    def __init__(self, log: "EventLog", pattern: str, severity: Severity, handler: Handler) -> None:
        self._log = log
        self._pattern = pattern
        self._severity = severity
        self._handler = handler
        self.reset()

    def reset(self) -> None:
        """Discard queued events and recorded failures. Called in a forked child."""
        self._waiting: deque[Event] = deque()
        self.guard = Guard(getattr(self._handler, "__qualname__", type(self._handler).__qualname__))

    @property
    def is_waiting(self) -> bool:
        """True if events are queued."""
        return bool(self._waiting)

    def queue(self, events: Sequence[Event]) -> None:
        """Queue the events that match the subscription. If the queue exceeds its capacity, drop the oldest events."""
        self._waiting.extend(
            event for event in events if event.severity >= self._severity and fnmatchcase(event.name, self._pattern)
        )
        while len(self._waiting) > self._log.capacity and self._next() is not None:
            self._log.dropped("unhandled")

    def call_handler(self, until: float) -> None:
        """Call the handler with each queued event, oldest first, until ``time.monotonic()`` reaches ``until``.

        Delivers at least one event unless the queue is empty. The remaining events stay queued. An exception in the
        handler propagates to the caller, and the event is not delivered again.
        """
        event = self._next()
        while event is not None:
            self._handler(event)
            event = self._next() if time.monotonic() < until else None

    def remove(self) -> None:
        """Unsubscribe the handler. No-op if the handler is already unsubscribed."""
        self._log.subscriptions = tuple(each for each in self._log.subscriptions if each is not self)

    def _next(self) -> Event | None:
        with suppress(IndexError):  # the queue is empty
            return self._waiting.popleft()
        return None


class EventLog:
    """Queue of emitted events that the collector has not processed yet. Adding an event never blocks or raises.

    Args:
        capacity: maximum number of queued events. Adding an event to a full queue drops the oldest event.
        dropped: function called for each dropped event. Its argument is the reason: ``severity``, ``sample``,
            ``rate``, ``overrun`` or ``unhandled``.
        wake: function called after an event is added to the queue.

    Attributes:
        subscriptions: all current subscriptions.

    Raises:
        InvalidArgumentError: if ``capacity`` is below 1.
    """

    def __init__(
        self, clock: Clock, capacity: int, dropped: Callable[[str], None], wake: Callable[[], None] = lambda: None
    ) -> None:
        check_count("capacity", capacity)
        self._clock = clock
        self.capacity = capacity
        self.dropped = dropped
        self._wake = wake
        self._waiting: deque[Event] = deque()
        self._rules: dict[str, EventRule] = {}
        self._gates: dict[str, _RateLimit] = {}
        self.subscriptions: tuple[Subscription, ...] = ()

    def emit(self, event: Event) -> None:
        """Queue ``event``, or drop it if the rule for its name rejects it."""
        gate = self._gates.get(event.name) or self._gate(event.name)
        refusal = gate.refusal(event, self._clock.monotonic_ns())
        if refusal is not None:
            self.dropped(refusal)
            return
        self._waiting.append(event)
        if len(self._waiting) > self.capacity:
            try:
                self._waiting.popleft()
            except IndexError:
                return  # the collector has emptied the queue
            self.dropped("overrun")
        self._wake()

    def rule(self, pattern: str, rule: EventRule) -> None:
        """Set the rule for events whose names match a shell pattern. The most recent matching rule applies."""
        self._rules = {**{key: old for key, old in self._rules.items() if key != pattern}, pattern: rule}
        self._gates = {}

    def subscribe(self, pattern: str, handler: Handler, severity: Severity = Severity.DEBUG) -> Subscription:
        """Subscribe a handler to events; see :meth:`~delta_tracker.monitor.monitor.Monitor.on`."""
        subscription = Subscription(self, pattern, severity, handler)
        self.subscriptions = (*self.subscriptions, subscription)
        return subscription

    def take(self) -> list[Event]:
        """Remove all queued events and return them, oldest first."""
        taken = []
        for _ in range(len(self._waiting)):
            try:
                taken.append(self._waiting.popleft())
            except IndexError:
                break  # emit() dropped one concurrently
        return taken

    def reset(self) -> None:
        """Discard all queued events and recorded failures. Called in a forked child."""
        self._waiting.clear()
        for subscription in self.subscriptions:
            subscription.reset()

    def _gate(self, name: str) -> _RateLimit:
        rule = EventRule()
        for pattern, each in self._rules.items():
            rule = each if fnmatchcase(name, pattern) else rule
        gate = _RateLimit(rule)
        if len(self._gates) < _MAX_GATES:
            self._gates[name] = gate
        return gate
