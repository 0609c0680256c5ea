"""Rules of :class:`WrappedStorage`, and the operations that they apply to."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import replace
from typing import Any, Literal, NoReturn, TypeAlias

from delta_tracker.errors import StorageError
from delta_tracker.stream.storage.store import StoredObject
from tests.stores.wrapped import OPERATIONS, READS, Operation, Perform, Rule

_DEADLINE_SECONDS = 60

When: TypeAlias = Callable[[Operation], bool]
"""Function that returns whether a rule applies to an operation."""


def always(_: Operation) -> bool:
    """Apply a rule to each operation."""
    return True


def reads(operation: Operation) -> bool:
    """Apply a rule to operations that read from a store or list it."""
    return operation.kind in READS


def on(*kinds: str, name: str | Callable[[str], object] = "") -> When:
    """Apply a rule to operations of some kinds, or of all.

    Args:
        kinds: kinds of the operations; none for all.
        name: beginning of the names, or function that returns whether a name belongs to them.
    """
    is_named = (lambda found: found.startswith(name)) if isinstance(name, str) else name
    return lambda operation: operation.kind in (kinds or OPERATIONS) and bool(is_named(operation.name))


def nth(numbers: int | Container[int], when: When = always) -> When:
    """Apply a rule to the operations with these numbers, from 1, of those that ``when`` finds."""
    counter, lock = itertools.count(1), threading.Lock()
    wanted = {numbers} if isinstance(numbers, int) else numbers

    def is_wanted(operation: Operation) -> bool:
        with lock:
            return when(operation) and next(counter) in wanted

    return is_wanted


def after(count: int, when: When = always) -> When:
    """Apply a rule to all but the first ``count`` operations that ``when`` finds."""
    return nth(range(count + 1, sys.maxsize), when)


class Killed(BaseException):
    """Simulates a killed process, whose exception handlers do not run."""


Fault: TypeAlias = str | type[BaseException] | Callable[[Operation], BaseException]
"""Reason of a :class:`StorageError`, type of an exception, or function that makes one."""


def _raise(fault: Fault, operation: Operation) -> NoReturn:
    if isinstance(fault, str):
        raise StorageError(operation.url, fault)
    raise fault() if isinstance(fault, type) else fault(operation)


def fails(when: When = always, fault: Fault = "503 service unavailable") -> Rule:
    """Raise an error instead of performing an operation."""

    def rule(operation: Operation, perform: Perform) -> Any:
        if when(operation):
            _raise(fault, operation)
        return perform(operation)

    return rule


def loses_answers(when: When = always, fault: Fault = "connection reset") -> Rule:
    """Perform an operation, then raise an error."""

    def rule(operation: Operation, perform: Perform) -> Any:
        is_lost = when(operation)
        answer = perform(operation)
        if is_lost:
            _raise(fault, operation)
        return answer

    return rule


def disconnects(when: When, fault: Fault = "connection reset") -> Rule:
    """Lose the answer of the first operation that ``when`` finds, and fail all later ones."""
    is_cut_off = threading.Event()

    def rule(operation: Operation, perform: Perform) -> Any:
        if is_cut_off.is_set():
            _raise(fault, operation)
        is_last = when(operation)
        answer = perform(operation)
        if is_last:
            is_cut_off.set()
            _raise(fault, operation)
        return answer

    return rule


def calls(
    when: When = always,
    *,
    before: Callable[[Operation], object] = always,
    after: Callable[[Operation, Any], object] = lambda *_: None,
) -> Rule:
    """Call functions before an operation and, with its answer, after it.

    Their own operations on the inner store bypass the rules.
    """

    def rule(operation: Operation, perform: Perform) -> Any:
        if not when(operation):
            return perform(operation)
        before(operation)
        answer = perform(operation)
        after(operation, answer)
        return answer

    return rule


def trickles(before_each: Callable[[Operation, int], object], when: When = always) -> Rule:
    """Call a function before each buffer of an object that is put, with the number of the buffer from 0."""

    def slowed(operation: Operation) -> Iterator[memoryview]:
        for number, buffer in enumerate(operation.arguments["buffers"]):
            before_each(operation, number)
            yield buffer

    def rule(operation: Operation, perform: Perform) -> Any:
        if operation.kind != "put" or not when(operation):
            return perform(operation)
        return perform(operation.having(buffers=slowed(operation)))

    return rule


Moment: TypeAlias = Literal["before", "within", "after"]
"""Moment of an operation; ``"within"`` is between the first two buffers of an object that is put."""


def watches(reached: Callable[[Operation, Moment], object]) -> Rule:
    """Call a function at each moment of each operation."""
    within = trickles(lambda operation, number: number == 1 and reached(operation, "within"))

    def rule(operation: Operation, perform: Perform) -> Any:
        reached(operation, "before")
        answer = within(operation, perform)
        reached(operation, "after")
        return answer

    return rule


def alters(change: Callable[[bytes], bytes], when: When = always) -> Rule:
    """Write other bytes than those of the operation."""

    def rule(operation: Operation, perform: Perform) -> Any:
        if "data" in operation.arguments and when(operation):
            operation = operation.having(data=change(operation.arguments["data"]))
        elif "buffers" in operation.arguments and when(operation):
            data = b"".join(operation.arguments["buffers"])
            operation = operation.having(buffers=[memoryview(change(data))])
        return perform(operation)

    return rule


def answers(answer: Any, when: When) -> Rule:
    """Return an answer without performing an operation."""
    return lambda operation, perform: answer if when(operation) else perform(operation)


def hides(is_hidden: Callable[[str], bool], when: When = always) -> Rule:
    """Answer reads and listings as if some objects did not exist, as a store or cache that lags."""

    def rule(operation: Operation, perform: Perform) -> Any:
        if operation.kind in ("read", "read_range", "size", "stat") and is_hidden(operation.name) and when(operation):
            return None
        answer = perform(operation)
        if isinstance(answer, list) and when(operation):
            return [each for each in answer if not is_hidden(each if isinstance(each, str) else each.name)]
        return answer

    return rule


class Stale:
    """Rule that repeats the first answer of each read and listing, as a cache, until it is cleared.

    Args:
        when: operations that the cache answers.
    """

    def __init__(self, when: When = always) -> None:
        self._when = when
        self._answers: dict[tuple[object, ...], Any] = {}

    def __call__(self, operation: Operation, perform: Perform) -> Any:
        if operation.kind not in READS or not self._when(operation):
            return perform(operation)
        place = {key: value for key, value in operation.arguments.items() if key in ("begin", "end", "after")}
        key = operation.kind, operation.name, *place.items()
        if key not in self._answers:
            self._answers[key] = copy.deepcopy(perform(operation))
        answer, out = self._answers[key], operation.arguments.get("out")
        if answer is None or out is None:
            return copy.deepcopy(answer)
        out[: len(answer)] = answer
        return out[: len(answer)]

    def clear(self) -> None:
        """Forget the answers."""
        self._answers.clear()


class Gate:
    """Rule that lets operations wait while it is closed. It is closed at first.

    Args:
        when: operations that wait.

    Attributes:
        reached: event that is set once an operation waits.
    """

    def __init__(self, when: When = always) -> None:
        self._when = when
        self._opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, operation: Operation, perform: Perform) -> Any:
        if not self._opened.is_set() and self._when(operation):
            self.reached.set()
            assert self._opened.wait(_DEADLINE_SECONDS), f"{operation.kind} of {operation.name} waits for ever"
        return perform(operation)

    def open(self) -> None:
        """Let the waiting operations continue, and all later ones pass."""
        self._opened.set()

    def close(self) -> None:
        """Let later operations wait."""
        self.reached.clear()
        self._opened.clear()


class Dated:
    """Rule that dates objects by a clock.

    Args:
        clock: function that returns Unix seconds.
        resolution: resolution of the dates in seconds; 0 for exact ones.

    Attributes:
        times: date of each object that was written.
    """

    def __init__(self, clock: Callable[[], float], resolution: float = 0.0) -> None:
        self._clock = clock
        self._resolution = resolution
        self.times: dict[str, float] = {}

    def __call__(self, operation: Operation, perform: Perform) -> Any:
        answer = perform(operation)
        if operation.kind in ("put", "replace") or (operation.kind == "create" and answer):
            now = self._clock()
            self.times[operation.name] = now // self._resolution * self._resolution if self._resolution else now
        transfer = operation.arguments.get("transfer")
        if transfer is not None and answer is not None:
            transfer.modified = self.times.get(operation.name, self._clock())
        if isinstance(answer, list):
            return [self._dated(each) for each in answer]
        return self._dated(answer)

    def _dated(self, answer: Any) -> Any:
        """Return an answer with the date of its object."""
        is_dated = isinstance(answer, StoredObject) and answer.name in self.times
        return replace(answer, modified=self.times[answer.name]) if is_dated else answer
