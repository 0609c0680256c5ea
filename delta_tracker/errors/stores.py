"""Errors of stores and caches."""

from __future__ import annotations

from delta_tracker.errors.base import StreamError


class StorageError(StreamError, OSError):
    """The store at ``url`` cannot be reached, read or written; see ``reason``."""

    _remedy = "Check the url, its permissions and free space, then try again; nothing was lost"

    def __init__(self, url: str, reason: str, remedy: str | None = None) -> None:
        super().__init__(f"the store {url} cannot be used: {reason}", self._remedy if remedy is None else remedy)
        self.url, self.reason = url, reason


class WriteRefusedError(StorageError):
    """The store at ``url`` has certainly not written an object; see ``reason``.

    With a ``name``, the store refused to create this object, although no object of that name exists. Without one, the
    directory of a local store was unmounted, deleted or replaced since it was opened, or has a link or a file instead
    of a folder, so that a write would go to another disk or to another stream. Writes succeed again once the directory
    is back. If it was replaced on purpose, or has another device number since its volume was mounted again, a new
    publisher is necessary.
    """

    def __init__(self, url: str, reason: str, remedy: str, name: str | None = None) -> None:
        super().__init__(url, reason, remedy)
        self.name = name

    @classmethod
    def taken(cls, url: str, name: str, attempts: int) -> WriteRefusedError:
        """Return the error for a name that the store refused ``attempts`` times to create."""
        return cls(
            url,
            f"it refused {attempts} times to create {name} as existing, but does not list it",
            "Remove what has this name in the store, such as a dangling link, then try again; nothing was lost",
            name,
        )


class AlteredEntryError(StorageError):
    """The store at ``url`` has other bytes under ``name`` than the publisher sent: they were altered on the way.

    The version was not committed. ``xxh3`` is the hash of the stored bytes; the next entry follows them.
    """

    _remedy = "Find out what alters objects on the way to the store, then try again; no row was lost"

    def __init__(self, url: str, name: str, xxh3: str) -> None:
        super().__init__(url, f"{name} has other bytes than were sent; the next version must be a snapshot")
        self.name, self.xxh3 = name, xxh3


class UnknownOutcomeError(StorageError):
    """It is unknown whether the store at ``url`` has ``name``, or will have it: see ``reason``.

    The answer to its creation was lost. Or it was written or deleted, but the names in the directory ``directory`` of a
    local store cannot be flushed to disk, so that a power loss may take that back. If it is the entry of a version,
    readers may apply it now or later. Its rows stay pending, and the next version follows it if it exists.
    """

    def __init__(self, url: str, name: str, reason: str, directory: str | None = None) -> None:
        if directory is None:
            problem = f"whether {name} was created is unknown: {reason}"
            remedy = "Try again: the next attempt finds what was created, and no row was lost"
        else:
            problem = f"{name} is not on disk, because {directory}/ cannot be synced: {reason}"
            remedy = "Check the disk, then try again; no row was lost"
        super().__init__(url, problem, remedy)
        self.name, self.directory = name, directory


class LostEntryError(StorageError):
    """The entry ``name`` of the store at ``url``, which was the newest, was deleted or replaced.

    It was not deleted by this library. A delta cannot follow it, because new readers cannot reach the delta. Nothing
    was published. The stream was claimed again by the entry ``claim``, a JSON text, and the next version is a snapshot.
    """

    _remedy = "Publish again: the next version is a snapshot, from which predictors continue"

    def __init__(self, url: str, name: str, claim: str) -> None:
        super().__init__(url, f"{name}, the newest entry, was deleted or replaced by another program")
        self.name, self.claim = name, claim


class UnsupportedStoreError(StorageError):
    """The store at ``url`` does not support what was asked of it.

    A store at an ``http://`` or ``https://`` url serves single objects only, and ``operation`` is another one. If it is
    None, the store has no atomic operation that creates an object only if it does not exist: a second publisher could
    replace an entry of the stream.
    """

    def __init__(self, url: str, operation: str | None = None) -> None:
        if operation is None:
            reason = "it has no atomic create-if-absent"
            remedy = "Use a store that honours If-None-Match: S3, GCS, Azure, a local directory, SeaweedFS, MinIO"
        else:
            reason = f"{operation} is not possible over http"
            remedy = "Use the url of the bucket or directory for everything but reading versions"
        super().__init__(url, reason, remedy)
        self.operation = operation


class StaleCacheError(StorageError):
    """An object is missing, short or altered in the cache at ``url``; it may be right at the origin.

    A predictor retries until ``seconds`` have passed since it first met the fault, and then resyncs.
    """

    _remedy = "The read is retried. If it lasts, check the lifetimes of the cache at the url"

    def __init__(self, url: str, name: str, seconds: float) -> None:
        super().__init__(url, f"{name} is missing, short or altered in the cache, for less than {seconds:g} s")
        self.name, self.seconds = name, seconds


class UnreadablePointerError(StorageError):
    """The server at ``url`` sends something else than the pointer object ``name``, see ``received`` and ``why``.

    It may be a log-in page, the page of a proxy, or compressed. Whether there are newer versions is unknown. The read
    is retried, and rows that were applied stay.
    """

    def __init__(self, url: str, name: str, received: str, why: str) -> None:
        where = f"{url.rstrip('/')}/{name}"
        super().__init__(
            url,
            f"{name} is no pointer, because {why}; received {received}",
            f"Make {where} the JSON object that the publisher wrote, unchanged: check the url, and for a log-in or "
            "compression in between. The read is repeated",
        )
        self.name, self.received, self.why = name, received, why


class BrokenCacheError(StorageError):
    """The directory of a host cache cannot be used; see ``reason``. ``url`` is the directory."""

    _remedy = "Pass a directory on a local file system that only this user can write to"

    def __init__(self, directory: str, reason: str) -> None:
        super().__init__(directory, reason)
        self.directory = directory
