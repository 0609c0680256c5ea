"""The classes of errors."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable

import pytest

from delta_tracker.errors import (
    CorruptPartError,
    DeltaTrackerError,
    FencedError,
    FollowEndedError,
    HeldVersionError,
    MalformedError,
    MissingExtraError,
    MissingVersionError,
    NameConflictError,
    StorageError,
    StreamError,
    TableMismatchError,
    UnsupportedModuleError,
    unraised,
)


def test_every_error_of_a_stream_is_a_stream_error() -> None:
    for kind in (CorruptPartError, FencedError, MalformedError, MissingVersionError, StorageError):
        assert issubclass(kind, StreamError)


@pytest.mark.parametrize(
    "error",
    [
        FencedError(1, 2, 3),
        FollowEndedError(SystemExit("enough")),
        HeldVersionError(7, "NaN"),
        MissingExtraError("redis", "redis"),
        NameConflictError("memory://", "log/1", 5),
        StorageError("memory://", "No space left on device"),
        TableMismatchError("t", "F32", "F16", ["a", "b"]),
        UnsupportedModuleError({"m": "DMPCollection"}, "Use another"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_sent_to_another_process(error: DeltaTrackerError) -> None:
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received), vars(received)) == (type(error), str(error), vars(error))


class _Rows:
    """An object that a traceback may keep alive."""


def _raised(alive: list[weakref.ref[_Rows]]) -> Exception:
    """Return an error whose traceback keeps an object alive, and which has a raised cause."""
    rows = _Rows()
    alive.append(weakref.ref(rows))
    try:
        try:
            raise ValueError("inner")  # noqa: TRY301
        except ValueError as error:
            raise KeyError("outer") from error
    except KeyError as error:
        return error


def _of_itself(error: Exception) -> Exception:
    error.args = (error, [error])
    return error


@pytest.mark.parametrize(
    "held",
    [
        lambda error: ExceptionGroup("several", [ExceptionGroup("two", [error]), OSError("x")]),
        lambda error: RuntimeError("failed", error),
        lambda error: RuntimeError("failed", {"errors": [(error,)]}),
        lambda error: RuntimeError(ValueError(error)),
        _of_itself,
    ],
    ids=["group", "argument", "containers", "nested", "cycle"],
)
def test_an_error_that_is_kept_keeps_no_rows(held: Callable[[Exception], Exception]) -> None:
    alive: list[weakref.ref[_Rows]] = []
    kept = unraised(held(_raised(alive)))
    gc.collect()
    assert kept is not None
    assert [reference() for reference in alive] == [None]
