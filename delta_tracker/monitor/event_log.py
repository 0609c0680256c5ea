"""The events of a program: which handlers subscribe to them, how many are let through, and a list of the newest."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.clock import Clock
from delta_tracker.monitor.event import Event, Severity
from delta_tracker.monitor.names import matches

Handler = Callable[[Event], None]

_NS = 1e-9
# Names are few; whoever puts a number into one makes many.
_MAX_GATES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRule:
    """Which events are let in.

    Args:
        severity: the lowest that is.
        per_second: how many of one name in a second on average; a burst may take that of ten seconds at once.
        sample: the fraction that is, drawn at random.

    Events are for what happens some times per iteration at most: they cost microseconds and every one is delivered.
    What happens more often is a stat.

    Raises:
        InvalidArgumentError: for a rate of 0 or less, or a fraction outside (0, 1].
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
class _Gate:
    """Lets the events of one name in."""

    rule: EventRule
    tokens: float = field(init=False)
    refilled_ns: int = 0

    def __post_init__(self) -> None:
        self.tokens = self._burst

    @property
    def _burst(self) -> float:
        return max(1.0, 10 * self.rule.per_second)

    def refusal(self, event: Event, now_ns: int) -> str | None:
        """Why ``event`` is not let in; None if it is."""
        if event.severity < self.rule.severity:
            return "severity"
        if self.rule.sample < 1 and random.random() >= self.rule.sample:  # noqa: S311  no secret
            return "sample"
        age = max(now_ns - self.refilled_ns, 0) * _NS
        self.tokens, self.refilled_ns = min(self._burst, self.tokens + age * self.rule.per_second), now_ns
        if self.tokens < 1:
            return "rate"
        self.tokens -= 1
        return None


class Subscription:
    """A handler's place; :meth:`remove` ends it."""

    def __init__(self, log: EventLog, pattern: str, severity: Severity, handler: Handler) -> None:
        self._log = log
        self._pattern = pattern
        self._severity = severity
        self.handler = handler

    def wants(self, event: Event) -> bool:
        """Whether the handler asked for such events."""
        return event.severity >= self._severity and matches(self._pattern, event.name)

    def remove(self) -> None:
        """Send it no more events; a second call does nothing."""
        self._log.unsubscribe(self)


class EventLog:
    """Takes events from any thread and keeps them until the collector fetches them. Nothing here waits or raises.

    Args:
        clock: for the rates.
        capacity: how many events wait for the collector, and how many of the newest are kept for :attr:`recent`. When
            more wait than that, the oldest is dropped.
        dropped: called with a reason for each event that is not let in or is dropped.
        wake: called for each event that waits.
    """

    def __init__(
        self, clock: Clock, capacity: int, dropped: Callable[[str], None], wake: Callable[[], None] = lambda: None
    ) -> None:
        if type(capacity) is not int or capacity < 1:
            raise InvalidArgumentError("capacity", capacity, "Pass a whole number of 1 or more")
        self._clock = clock
        self._capacity = capacity
        self._dropped = dropped
        self._wake = wake
        self._waiting: deque[Event] = deque()
        self._recent: deque[Event] = deque(maxlen=capacity)
        self._rules: dict[str, EventRule] = {}
        self._gates: dict[str, _Gate] = {}
        self._subscriptions: tuple[Subscription, ...] = ()

    def emit(self, event: Event) -> None:
        """Take an event."""
        gate = self._gates.get(event.name) or self._gate(event.name)
        refusal = gate.refusal(event, self._clock.monotonic_ns())
        if refusal is not None:
            self._dropped(refusal)
            return
        self._recent.append(event)
        self._waiting.append(event)
        if len(self._waiting) > self._capacity:
            try:
                self._waiting.popleft()
            except IndexError:
                return  # the collector was faster
            self._dropped("overrun")
        self._wake()

    def is_enabled(self, name: str, severity: Severity = Severity.INFO) -> bool:
        """Whether events of this name and severity are let in; ask before computing their data."""
        return severity >= (self._gates.get(name) or self._gate(name)).rule.severity

    def rule(self, pattern: str, rule: EventRule) -> None:
        """Set which events are let in; of several patterns that fit a name, the latest wins."""
        self._rules = {**{key: old for key, old in self._rules.items() if key != pattern}, pattern: rule}
        self._gates = {}

    def subscribe(self, pattern: str, handler: Handler, severity: Severity = Severity.DEBUG) -> Subscription:
        """Have ``handler`` called with every event that fits, in a thread of the library."""
        subscription = Subscription(self, pattern, severity, handler)
        self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; one that ended is no error."""
        self._subscriptions = tuple(each for each in self._subscriptions if each is not subscription)

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        """Who gets events."""
        return self._subscriptions

    @property
    def recent(self) -> list[Event]:
        """The newest events that were let in, oldest first, delivered or not."""
        return list(self._recent)

    def take(self) -> list[Event]:
        """The events that wait, oldest first; they wait no longer."""
        taken = []
        for _ in range(len(self._waiting)):
            try:
                taken.append(self._waiting.popleft())
            except IndexError:
                break  # one was dropped meanwhile
        return taken

    def reset(self) -> None:
        """Forget all events; for a process that was forked."""
        self._waiting.clear()
        self._recent.clear()

    def _gate(self, name: str) -> _Gate:
        rule = EventRule()
        for pattern, each in self._rules.items():
            rule = each if matches(pattern, name) else rule
        gate = _Gate(rule)
        if len(self._gates) < _MAX_GATES:
            self._gates[name] = gate
        return gate
