"""Complete versions after their cut, in threads of the publisher: :class:`Delivery`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from delta_tracker.errors import LostEntryError, RankLostError
from delta_tracker.publisher.coordinator import Coordinator, Draft, Share
from delta_tracker.publisher.exchange import Message, check_alike, opened
from delta_tracker.publisher.rounds import Letter, Rounds, Sign
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.tracker.rank_group import RankGroup
from delta_tracker.types import Delta

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a version.

    Args:
        manifest: the version; None if it was not published.
        error: why it was not published.
        read: the read of the tracker whose rows it has; None if this rank read none.
    """

    manifest: Manifest | None = None
    error: Exception | None = None
    read: Delta | None = None


class Delivery:
    """Threads of one rank that complete each version after its cut, without the training thread.

    Each rank writes its share of the version and sends the description to rank 0. Rank 0 commits the version and sends
    the outcome to all. A message is sent once, so that the messages of a version grow linearly with the number of
    ranks. While a rank writes, or rank 0 commits, the ranks exchange signs of life. So a rank that died is noticed at
    once, one that is stopped within the timeout, and a slow store is no failure.

    Args:
        writer: writes the shares of this rank and, on rank 0, commits.
        group: group of all ranks that nothing else uses.
        seconds: time between two signs of life.
        committed: called on rank 0 with each committed version, in a thread of this object.
    """

    def __init__(
        self,
        writer: Coordinator,
        group: RankGroup,
        seconds: float,
        committed: Callable[[Manifest], None],
        runtime: Runtime,
    ) -> None:
        self._writer = writer
        self._group = group
        self._rounds = Rounds(group)
        self._seconds = seconds
        self._committed = committed
        self._worker = runtime.executor("publisher")
        self._messenger = runtime.executor("publisher-exchange")

    def submit(self, action: Callable[[], _T]) -> Future[_T]:
        """Run an action in the thread that writes."""
        return self._worker.submit(action)

    def start(self, outcome: Future[Outcome], number: int, draft: Draft | Exception, read: Delta | None = None) -> None:
        """Start to complete a version. A second call with the same ``outcome`` has no effect.

        Such a call is made if the first was interrupted, perhaps after its start. The outcome has the read of the one
        that counts.

        Args:
            outcome: future of the result, which never has an exception.
            number: number of the version's cut, the same on all ranks.
            draft: this rank's contents of the version, or the error of its read.
            read: read of the contents.
        """

        def run() -> None:
            if outcome.done():  # the first call was interrupted after it had started this
                return
            try:
                found = self._completed(number, draft)
            except BaseException as error:  # noqa: BLE001  the training thread waits for an outcome, and reports it
                found = Outcome(error=self._lost(error))
            outcome.set_result(replace(found, read=read))

        (self._worker if self._group.world_size == 1 else self._messenger).submit(run)

    def close(self) -> None:
        """Complete the version in progress, and end the threads."""
        self._messenger.shutdown()
        self._worker.shutdown()
        self._group.close()

    def _completed(self, number: int, draft: Draft | Exception) -> Outcome:
        if self._group.world_size == 1:
            share = self._writer.write(draft)
            return self._ended(share, self._commit(share, {}))
        job = self._worker.submit(self._writer.write, draft)
        return self._lead(number, job) if self._group.rank == 0 else self._follow(number, job)

    def _lost(self, error: BaseException) -> Exception | None:
        """Leave the group, because the other ranks may have sent other letters, and return the error to report."""
        if self._group.world_size == 1 and isinstance(error, Exception):
            return error
        self._group.leave(f"{type(error).__name__} while a version was completed: {error}")
        self._group.close()  # the other ranks notice it at once
        return self._group.lost

    def _lead(self, number: int, job: Future[Share]) -> Outcome:
        """Collect the shares of all ranks, commit the version, and send the outcome. Only on rank 0."""
        shares: dict[int, bytes] = {}
        commit: Future[Message] | None = None
        try:
            while commit is None or not commit.done():
                self._wait(commit or job)
                letters = self._rounds.collect(number)
                shares |= {rank: each.data for rank, each in letters.items() if each.sign == Sign.SHARE}
                if commit is None and job.done() and len(shares) == len(letters):
                    commit = self._worker.submit(self._commit, job.result(), shares)
                    self._wait(commit)
                if commit is None or not commit.done():
                    self._rounds.answer(Letter(number, Sign.WORKING))
            self._rounds.answer(Letter(number, Sign.OUTCOME, commit.result().data))
        except RankLostError:
            if commit is None:
                raise
        return self._ended(job.result(), commit.result())

    def _follow(self, number: int, job: Future[Share]) -> Outcome:
        """Send the share of this rank to rank 0, and wait for the outcome."""
        is_sent = False
        while True:
            if not is_sent:
                self._wait(job)
            if is_sent:
                self._rounds.send(Letter(number, Sign.WAITING))
            elif job.done():
                self._rounds.send(Letter(number, Sign.SHARE, job.result().message.data))
                is_sent = True
            else:
                self._rounds.send(Letter(number, Sign.WORKING))
            answer = self._rounds.receive(number)
            if answer.sign == Sign.OUTCOME:
                return self._ended(job.result(), Message.of(lambda data=answer.data: opened(0, data)))

    def _wait(self, job: Future[Any]) -> None:
        """Wait for a job until the next sign of life is due."""
        wait([job], self._seconds)

    def _commit(self, share: Share, others: Mapping[int, bytes]) -> Message:
        """Commit the version of all ranks' shares. Return the message to all ranks, which may be an error."""

        def act() -> dict[str, object]:
            if share.message.failure is not None:
                raise share.message.failure
            messages = [share.message.content]
            if others:
                messages += [opened(rank, others[rank]) for rank in sorted(others)]
                check_alike(messages, "cut", "tables")
            self._committed(self._writer.commit(share, messages))
            return self._writer.answer()

        return Message.of(act)

    def _ended(self, share: Share, message: Message) -> Outcome:
        """Return the outcome that rank 0's message describes, or the error of this rank."""
        failure = share.message.failure or message.failure
        if failure is None:
            try:
                return Outcome(self._writer.follow(message.content))
            except Exception as error:  # noqa: BLE001  the training thread reports it
                failure = error
        if isinstance(failure, LostEntryError):
            self._writer.lost(failure)
        return Outcome(error=failure)
