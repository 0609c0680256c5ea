"""Errors of the objects and versions of a stream, and of operations on a whole stream."""

from __future__ import annotations

from delta_tracker.errors.base import StreamError

CONTINUE = "Publish a snapshot to the present stream: predictors continue from it"


class MalformedError(StreamError, ValueError):
    """A manifest, a part or another object of a stream is malformed; see ``path`` and ``reason``."""

    _remedy = (
        "Check for other writers to this stream, and copy the object back from a mirror. If it is an entry of the log, "
        "call Publisher.snapshot(): predictors continue from it. If no publisher can claim the stream, start a new "
        "stream at another url"
    )

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} is malformed: {reason}", self._remedy)
        self.path, self.reason = path, reason


class NewerFormatError(MalformedError):
    """The object ``path`` of a stream has the format ``found``, which only newer releases of the library can read.

    ``known`` describes the formats that this release reads. No release reads drafts of a format that is final now.
    """

    _remedy = "Upgrade delta_tracker on this host"

    def __init__(self, path: str, found: str, known: str) -> None:
        super().__init__(path, f"its format is {found}; this release reads {known}")
        self.found, self.known = found, known


class CorruptPartError(StreamError, ValueError):
    """A part is missing or truncated, or does not match its manifest; see ``path`` and ``reason``.

    No row of the version was applied, with one exception. A part that is too large for memory is read twice, first to
    check it and then to apply it. If the part changed in between, some of its rows may have been applied.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"part {path} is corrupt: {reason}",
            f"{CONTINUE}. To restore, pin or roll back, pass an older version",
        )
        self.path, self.reason = path, reason


class MissingVersionError(StreamError, LookupError):
    """Version ``version`` of a stream is missing; no later version was applied.

    ``head`` is the newest version.
    """

    def __init__(self, version: int, head: int) -> None:
        super().__init__(
            f"version {version} is missing, and the newest version is {head}",
            f"{CONTINUE}. If you asked for this version, ask for another one",
        )
        self.version, self.head = version, head


class NoSnapshotError(StreamError, LookupError):
    """The stream at ``url`` has no snapshot, or none at or below ``version``.

    If the stream has no snapshot, ``version`` is None.
    """

    def __init__(self, url: str, version: int | None = None) -> None:
        if version is None:
            problem = f"the stream {url} has no snapshot yet"
            remedy = "Call Publisher.snapshot() on the trainer, then sync() again; or check the url"
        else:
            problem = f"version {version} of {url} precedes the first snapshot and has no rows"
            remedy = "Pass the version of the first snapshot, usually 1, or a later one"
        super().__init__(problem, remedy)
        self.url, self.version = url, version


class StreamReplacedError(StreamError, RuntimeError):
    """The stream at ``url`` was replaced: it is not the stream that the applied version ``version`` came from.

    The version was applied completely or in part.
    """

    def __init__(self, url: str, version: int) -> None:
        super().__init__(f"the stream {url} is not the one of which version {version} was applied", CONTINUE)
        self.url, self.version = url, version


class OlderCopyError(StreamError, RuntimeError):
    """The log at ``url`` ends at version ``newest``, before the applied version ``version``.

    A mirror, a replica or a cache may be late, or the store was restored from an older copy.
    """

    def __init__(self, url: str, newest: int, version: int) -> None:
        super().__init__(
            f"{url} shows an older copy of the stream, up to version {newest}, and version {version} is applied",
            "It continues when the log has a newer version; if the store was restored, restart the trainer, which "
            "publishes a snapshot",
        )
        self.url, self.newest, self.version = url, newest, version


class PinError(StreamError, RuntimeError):
    """A pin or a release of the stream at ``url`` was not written, or was undone; see ``reason``."""

    def __init__(self, url: str, what: str, reason: str, remedy: str) -> None:
        super().__init__(f"{url} cannot be {what}: {reason}", remedy)
        self.url, self.reason = url, reason


class MirrorDivergedError(StreamError, RuntimeError):
    """The destination of a mirror is not a prefix of its source; see ``reason``. Nothing was overwritten."""

    def __init__(self, source: str, destination: str, version: int, reason: str) -> None:
        super().__init__(
            f"{destination} differs from {source} at version {version}: {reason}",
            "Mirror to an empty destination, or stop the program that writes to this one",
        )
        self.source, self.destination, self.version, self.reason = source, destination, version, reason
