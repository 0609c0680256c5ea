"""The classes of errors."""

from __future__ import annotations

import pickle

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
