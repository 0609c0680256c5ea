"""Errors of restores and of takeovers."""

from __future__ import annotations

from delta_tracker.errors.base import StreamError


class RestoreMismatchError(StreamError, ValueError):
    """The saved training state does not fit this job, so nothing was restored.

    ``what`` differs: the version has ``saved``, and this job has ``found``.
    """

    def __init__(
        self,
        what: str,
        saved: object,
        found: object,
        remedy: str = "Build the job like the one that published the version",
    ) -> None:
        super().__init__(f"{what} is {saved} in the version but {found} in this job; nothing was restored", remedy)
        self.what = what
        self.saved = str(saved)
        self.found = str(found)


class NotRecoverableError(StreamError, LookupError):
    """Version ``version`` of the stream at ``url`` has no complete training state, so nothing was restored.

    ``reason`` describes what is missing. ``version`` is None on every rank if no version was published to the stream
    yet: the job can start without a restore.
    """

    def __init__(self, url: str, version: int | None, reason: str) -> None:
        if version is None:
            problem = f"{url} has nothing to restore: {reason}"
            remedy = "Check the URL, or start without restore: no version was published yet"
        else:
            problem = f"version {version} of {url} cannot be restored: {reason}"
            remedy = "Choose another version; a Publisher(..., recovery=Recovery(...)) writes such versions"
        super().__init__(problem, remedy)
        self.url, self.version, self.reason = url, version, reason


class RestoreFailedError(StreamError, RuntimeError):
    """A restore failed because rank ``rank`` failed with ``reason``. The model may be partly written.

    If it is, calling the model raises :class:`IncompleteModelError`. The rank is this one if an object of this rank
    raised an error when it loaded its state.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(
            f"the restore failed: rank {rank} failed with {reason}",
            "Fix the problem on that rank and restore again on all ranks",
        )
        self.rank, self.reason = rank, reason


class IncompleteModelError(StreamError, RuntimeError):
    """The model has rows of different times, because a restore of version ``version`` did not end.

    If ``is_following``, it follows a stream as a :class:`~delta_tracker.recovery.standby.Standby`, and has the rows of
    that version, but no other state.
    """

    def __init__(self, version: int, *, is_following: bool = False) -> None:
        if is_following:
            super().__init__(
                f"the model follows a stream at version {version}", "Call Standby.take_over() first, on all ranks"
            )
        else:
            super().__init__(
                f"the model is incomplete: a restore of version {version} was interrupted",
                "Call restore() again on all ranks",
            )
        self.version, self.is_following = version, is_following


class TakeoverFailedError(StreamError, RuntimeError):
    """The takeover of the stream at ``url`` failed with ``reason``.

    If ``is_claimed``, it was claimed by the entry ``version``. The claim is kept, and the next call completes the
    takeover. Until then, the model raises :class:`IncompleteModelError`. If a version before the claim cannot be read,
    :func:`~delta_tracker.recovery.restore.restore` an older one instead, and build the publisher with the url.

    Otherwise, nothing was claimed, because ``version`` cannot be applied. ``applied`` is the last version that all
    ranks have applied; None if there is none.
    """

    def __init__(
        self, url: str, version: int, reason: str, *, is_claimed: bool = True, applied: int | None = None
    ) -> None:
        if is_claimed:
            problem = f"the takeover of {url} failed after the claim of version {version}: {reason}"
            remedy = (
                "The former trainer is fenced and no job trains: fix the problem and call take_over() again; the claim "
                "is kept. If a version is damaged, call restore(...) with an older version instead"
            )
        else:
            at = "before its first version" if applied is None else f"at version {applied}"
            problem = f"the standby of {url} is {at} and cannot apply version {version}: {reason}"
            remedy = (
                "If the trainer is alive, publish a snapshot; otherwise, restore(...) an older version or repair the "
                "store; force=True claims the stream nevertheless"
            )
        super().__init__(problem, remedy)
        self.url, self.version, self.reason, self.is_claimed, self.applied = url, version, reason, is_claimed, applied
