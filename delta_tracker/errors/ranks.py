"""Errors of publishers and of other calls of all ranks."""

from __future__ import annotations

from delta_tracker.errors.base import StreamError


class FencedError(StreamError, RuntimeError):
    """A publisher is fenced: a newer publisher has claimed the stream, and this one can publish no more versions.

    ``generation`` is the generation of the fenced publisher, and ``owner`` that of the newer publisher. ``version`` is
    a version that the newer publisher committed.
    """

    def __init__(self, generation: int, owner: int, version: int) -> None:
        super().__init__(
            f"publisher of generation {generation} is fenced: generation {owner} holds version {version}",
            "Stop this trainer, or build a new Publisher to claim the stream again",
        )
        self.generation, self.owner, self.version = generation, owner, version


class LivePublisherError(StreamError, RuntimeError):
    """The publisher of generation ``generation`` of the stream at ``url`` may be alive, so it was not replaced.

    ``version`` is the newest version, and ``seconds`` the time since the publisher's last sign of life, by the store's
    clock. It is None if the version was committed during the call.
    """

    def __init__(self, url: str, generation: int, version: int, seconds: float | None = None) -> None:
        sign = "committed during the call" if seconds is None else f"last sign {seconds:.1f} s ago"
        super().__init__(
            f"{url} has a live publisher of generation {generation}: version {version}, {sign}",
            "Stop that trainer, wait, or fence it with force=True or --force",
        )
        self.url, self.generation, self.version, self.seconds = url, generation, version, seconds


class PublishError(StreamError, RuntimeError):
    """A version was not published because rank ``rank`` failed with ``reason``; all rows stay pending.

    If ``is_unknown``, the version may have been published, or may appear later; the next version then follows it.
    """

    def __init__(self, rank: int, reason: str, *, is_unknown: bool = False) -> None:
        outcome = "whether the version was published is unknown" if is_unknown else "the version was not published"
        super().__init__(
            f"{outcome}: rank {rank} failed with {reason}",
            "Fix the problem on that rank and publish again; no row was lost",
        )
        self.rank, self.reason, self.is_unknown = rank, reason, is_unknown


class RankLostError(StreamError, RuntimeError):
    """A rank died, exceeded a timeout, or was interrupted; all rows stay pending. See ``reason``."""

    def __init__(
        self,
        reason: str,
        remedy: str = (
            "Check that every rank makes the same calls of the Publisher, and restart the job on all ranks; "
            "a new Publisher then claims the stream"
        ),
    ) -> None:
        super().__init__(f"a rank was lost: {reason}", remedy)
        self.reason = reason


class UnfinishedStepError(StreamError, RuntimeError):
    """A version was not cut, because its rows would not be those after a whole training step; rows stay pending.

    See ``reason``: an update of rows is in progress, or rows were updated since the last ``tracker.step()``, so that a
    restored job would train a batch again.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"the rows cannot be read consistently: {reason}", remedy)
        self.reason = reason
