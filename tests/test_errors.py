"""The classes of errors."""

from __future__ import annotations

from delta_tracker.errors import (
    CorruptPartError,
    FencedError,
    MalformedError,
    MissingVersionError,
    StorageError,
    StreamError,
)


def test_every_error_of_a_stream_is_a_stream_error() -> None:
    for kind in (CorruptPartError, FencedError, MalformedError, MissingVersionError, StorageError):
        assert issubclass(kind, StreamError)
