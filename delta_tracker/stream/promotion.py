"""Promotion of a mirror: the start of a new stream after the last entry that was copied."""

from __future__ import annotations

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage


def promote(storage: Storage) -> Manifest:
    """Start a new stream after the newest entry of a log, so that a publisher can continue there; return its claim.

    Stop the former trainer and the mirror first: this function does not look for the publisher of the source, as
    ``delta-tracker mirror --promote`` does. Restore the trainer from the mirror before the call: afterwards the log has
    no snapshot of the new stream to restore from. Then build the publisher, whose first version is a snapshot.
    Predictors keep their rows until this snapshot, and continue from it.

    The call is idempotent: if the newest entry has started a stream after another one, it is returned.

    Raises:
        LivePublisherError: if an entry was appended during the call, by a mirror or a publisher that still runs.
            Nothing was created.
        StorageError: if the store fails; the stream may have been started. Repeat the call.

    Example:
        >>> promote(Storage("memory://"))
        Traceback (most recent call last):
        ...
        delta_tracker.errors.InvalidArgumentError: url='memory://' cannot be used. Pass the url of a stream.
    """
    log = StreamLog(storage)
    head = log.head()
    if head is None:
        raise InvalidArgumentError("url", storage.url, "Pass the url of a stream")
    if head.forked_from is not None:
        return head
    return log.claim(after=head.link, forks=True).head
