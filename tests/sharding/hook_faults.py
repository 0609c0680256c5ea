"""Let hooks fail, and check that the next read is complete and that the one after next is exact again.

A point is a call, in a hook, of a function of torch, of an engine or of numpy, which may allocate memory, of a metric,
of the log of messages, or of the autograd engine. :class:`Faults` lets one point fail, or all points from one on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

import delta_tracker
from delta_tracker import ModelDeltaTracker
from delta_tracker.monitor.series import Cell
from delta_tracker.sharding import kernel_hooks, watcher
from delta_tracker.tracker.row_sets import numba
from delta_tracker.tracker.row_sets.numba import NumbaRows
from delta_tracker.tracker.row_sets.row_set import RowSet
from delta_tracker.tracker.row_sets.torch import TorchRows

_PACKAGE = f"{Path(delta_tracker.__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
_ENGINE_CALLS = {"mark", "mark_all", "mark_new", "mark_new_padded", "contains", "merge", "__init__"}
# Attributes; what a rank sends to the others, which needs no memory; the hook of a lookup whose node is unknown.
_NO_POINTS = ("__get__", "fill_", "all_reduce", "register_hook")
# Functions that handle errors, and those that torch calls: they contain one call of a function that may fail. Their own
# lines allocate no more than a call does.
HANDLERS = {
    "LogWrites.end_write_later",
    "LogWrites.mark_all_later",
    "EvictionHook.before",
    "EvictionHook._before.<locals>.<lambda>",
    "EvictionHook._missed",
    "LaunchHook._report",
    "PostLookupHook._post_lookup",
    "PostLookupHook._watch_output",
    "PostLookupHook._write_begins",
    "PostLookupHook._write_ends",
    "SegmentStore.mark_all_later",
    "StepHook.run",
    "Watcher._contained",
    "_BackwardToken.__call__",
    "_BackwardToken.__del__",
    "WrappedMethod.__call__",
    "WrappedMethod._end",
    "_Steps._after",
    "_Steps._before",
    "untraced.<locals>.call",
}
NO_READ, BEFORE_WRITES, AFTER_WRITES, AROUND_WRITES, AT_POINTS = READS = (
    "no read",
    "before writes",
    "after writes",
    "around writes",
    "at points",
)


class EngineError(Exception):
    """Error of an engine that is not a lack of memory, such as a kernel that does not compile."""


class Faults(TorchFunctionMode):
    """Context manager in which points of hooks raise.

    Args:
        first: number of the point that raises, from 0; None for none.
        for_ever: True if all points after it raise, too.
        error: the error.
        at_point: called at each point before it raises.

    Attributes:
        num_points: number of points so far.
        is_paused: True while calls are no points.
    """

    def __init__(
        self,
        first: int | None = None,
        *,
        for_ever: bool = False,
        error: type[Exception] = MemoryError,
        at_point: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._at_point = at_point
        self._first = first
        self._for_ever = for_ever
        self._error = error
        self._patches = ExitStack()
        self.num_points = 0
        self.is_paused = True

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_paused and getattr(function, "__name__", "") not in _NO_POINTS and _is_called_by_hook():
            self._point()
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> Self:
        self._patch(RowSet, "create_each")
        for engine in (NumbaRows, TorchRows):
            for name in vars(engine).keys() & _ENGINE_CALLS:
                self._patch(engine, name, module=engine.__module__)
        self._patch(Cell, "add")
        for name in ("_end_with_backward", "_lookup_node"):
            self._patch(kernel_hooks, name)
        self._patches.enter_context(_patched(watcher, "_logger", _Messages(self._failing(_ignore))))
        memory = SimpleNamespace(**vars(np))
        for name in ("zeros", "empty", "concatenate"):
            setattr(memory, name, self._failing(getattr(np, name)))
        self._patches.enter_context(_patched(numba, "np", memory))
        super().__enter__()
        self.is_paused = False
        return self

    def __exit__(self, *error: object) -> None:
        self.is_paused = True
        super().__exit__(*error)
        self._patches.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which no point raises, for a read while the training step runs."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def _point(self) -> None:
        number, self.num_points = self.num_points, self.num_points + 1
        if self._at_point is not None:
            self._at_point()
        if self._first is not None and (number == self._first or (self._for_ever and number > self._first)):
            raise self._error("a fault in a hook")

    def _failing(self, function: Callable[..., Any], *, module: str = "") -> Callable[..., Any]:
        """Return a function that is a point, unless ``module`` itself calls it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.is_paused and sys._getframe(1).f_globals.get("__name__") != module:
                self._point()
            return function(*args, **kwargs)

        return call

    def _patch(self, owner: Any, name: str, *, module: str = "") -> None:
        held = vars(owner)[name]
        failing = self._failing(getattr(held, "__func__", held), module=module)
        self._patches.enter_context(
            _patched(owner, name, classmethod(failing) if isinstance(held, classmethod) else failing)
        )


@contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    held = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, held)


class _Messages:
    """Logger whose messages are dropped."""

    def __init__(self, log: Callable[..., None]) -> None:
        self.error = self.exception = self.warning = log


def _ignore(*_: object, **__: object) -> None:
    pass


def _is_called_by_hook() -> bool:
    """Return True if the library calls a function of torch, and not the model or its optimizer."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_PACKAGE)


class Copy:
    """Copy of all rows, to which a consumer applies what it reads.

    Args:
        tracker: the tracker.
        consumer: name of the consumer.
    """

    def __init__(self, tracker: ModelDeltaTracker, consumer: str | None = None) -> None:
        self._tracker = tracker
        self._consumer = consumer
        tracker.clear(consumer)
        self.rows = {fqn: tracker.read_rows(fqn) for fqn in tracker.tables}

    def read(self, faults: Faults | None = None) -> dict[str, int]:
        """Read, apply the rows, and check that the copy is complete. Return the number of rows by table.

        Args:
            faults: faults of the read.
        """
        delta = self._tracker.get_delta(self._consumer, with_values=True)
        if faults is not None:
            faults.is_paused = True
        for fqn, rows in delta.items():
            assert rows.values is not None
            if rows.known is not None and rows.states is not None:
                old = self.rows[fqn][rows.ids]
                assert torch.equal(rows.states[rows.known], old[rows.known]), "a wrong old state"
            self.rows[fqn][rows.ids] = rows.values
        for fqn, rows in self.rows.items():
            assert torch.equal(rows, self._tracker.read_rows(fqn)), f"rows of {fqn} are lost"
        return {fqn: len(rows.ids) for fqn, rows in delta.items()}


class Training:
    """Training of a model whose hooks fail. Subclasses make the steps.

    Args:
        tracker: tracker of the model.

    Attributes:
        copy: copy of a consumer.
        faults: the faults of the current step.
        when: one of :data:`READS`: where the consumer reads inside a step.
    """

    most_rows = 8  # of a table that a step changes

    def __init__(self, tracker: ModelDeltaTracker) -> None:
        self.tracker = tracker
        self.copy = Copy(tracker)
        self.faults: Faults | None = None
        self.when = NO_READ

    def step(self, number: int) -> None:
        """Train one batch. Call :meth:`writing` before each write of a table, and :meth:`written` after it."""
        raise NotImplementedError

    def writing(self, *_: object) -> None:
        """Read, if the consumer reads before writes."""
        self._read(BEFORE_WRITES, AROUND_WRITES)

    def written(self, *_: object) -> None:
        """Read, if the consumer reads after writes."""
        self._read(AFTER_WRITES, AROUND_WRITES)

    def at_point(self) -> None:
        """Read where another thread could, which is not while a hook holds the lock."""
        if not self.tracker._log.lock._is_owned():  # type: ignore[attr-defined]
            self._read(AT_POINTS)

    def _read(self, *whens: str) -> None:
        if self.faults is not None and self.when in whens:
            with self.faults.paused():
                self.copy.read()

    def failing_step(self, number: int, faults: Faults, when: str) -> None:
        """Train a batch with faults. The next read is complete, and the read after the next step but one is exact."""
        self.when = when
        with faults as self.faults:
            self.step(number)
        self.faults = None
        self._fail_to_read(number)
        self.copy.read()
        for later in (1, 2):
            self.step(number + later)
            counts = self.copy.read()
        for fqn, count in counts.items():
            assert count <= self.most_rows, f"all rows of {fqn} are still read"

    def _fail_to_read(self, number: int) -> None:
        """Let a read fail at one of its points."""
        with Faults(number % 50) as faults, suppress(MemoryError):
            self.copy.read(faults)


def fail_at_every_point(training: Training, whens: Sequence[str] = READS, stride: int = 1) -> dict[str, int]:
    """Train with a fault at every point, once and for ever, and with reads at each place.

    Args:
        training: the training.
        whens: where the consumer reads.
        stride: use each ``stride``-th point only.

    Returns:
        Number of points that failed, and number of errors that the tracker counted.
    """
    num_failed, number = 0, 0
    for when in whens:
        for error, for_ever in ((MemoryError, False), (MemoryError, True), (EngineError, False)):
            first = num_failed % stride
            while True:
                at_point = training.at_point if when == AT_POINTS else None
                faults = Faults(first, for_ever=for_ever, error=error, at_point=at_point)
                training.failing_step(number, faults, when)
                if faults.num_points <= first:
                    break
                num_failed, number, first = num_failed + 1, number + 3, first + stride
    return {"failed": num_failed, "errors": training.tracker.num_hook_errors}


def fail_at_every_line(training: Training, stride: int = 1) -> dict[str, int]:
    """Train with one MemoryError at every line of the library that a hook runs, except where the errors are handled.

    Args:
        training: the training.
        stride: use each ``stride``-th line only.

    Returns:
        Number of lines that failed, and number of errors that the tracker counted.
    """
    num_failed, number, first = 0, 0, 0
    while True:
        lines = _Lines(first)
        with Faults() as training.faults, lines:
            training.step(number)
        training.faults = None
        if not lines.has_raised:
            return {"failed": num_failed, "errors": training.tracker.num_hook_errors}
        training.copy.read()
        for later in (1, 2):
            training.step(number + later)
            counts = training.copy.read()
        for fqn, count in counts.items():
            assert count <= training.most_rows, f"all rows of {fqn} are still read"
        num_failed, number, first = num_failed + 1, number + 3, first + stride


class _Lines:
    """Context manager in which one line of the library raises MemoryError.

    Args:
        first: number of the line.

    Attributes:
        has_raised: True if the line was reached.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._num_lines = 0
        self.has_raised = False

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE) or code.co_qualname in HANDLERS:
            return None
        if event == "line":
            self._num_lines += 1
            if self._num_lines > self._first:
                self.has_raised = True
                raise MemoryError(f"a fault at line {frame.f_lineno} of {code.co_filename}")
        return self._trace
