"""Errors of row stores."""

from __future__ import annotations

from delta_tracker.errors.base import StreamError

SINK_CLOSED = "the sink is closed", "Call open() first"
SINK_FORKED = "this process was forked", "Build a sink in this process"
NO_VERSION = "no version is complete yet", "Wait until the predictor of the row store has applied a version"
"""Reasons and remedies of a :class:`SinkError`."""


class SinkError(StreamError, OSError):
    """The row store at ``target`` cannot be reached, read or written; see ``reason``. Readers keep its stored rows."""

    _remedy = "Check the row store and its free space. The next sync() or follow() completes the version"

    def __init__(self, target: str, reason: str, remedy: str | None = None) -> None:
        super().__init__(f"the row store {target} cannot be used: {reason}", remedy or self._remedy)
        self.target, self.reason = target, reason


class SinkBusyError(SinkError):
    """Another process, ``writer``, writes to the row store at ``target``, or became its writer meanwhile."""

    _remedy = "Stop the other writer, or use another prefix or directory: a row store has one writer"

    def __init__(self, target: str, writer: str) -> None:
        super().__init__(target, f"{writer} is its writer")
        self.writer = writer


class MalformedSinkError(StreamError, ValueError):
    """An object ``where`` of a row store is invalid; see ``reason``."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where} in the row store is invalid: {reason}",
            "Delete the keys of the prefix, or the directory, and write the store again from the stream",
        )
        self.where, self.reason = where, reason
