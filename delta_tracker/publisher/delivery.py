"""Background threads of a publisher: :class:`Delivery` for versions, and :class:`PublisherHeartbeats`."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import LostEntryError, RankLostError, UnknownOutcomeError
from delta_tracker.publisher.coordinator import Coordinator, Draft
from delta_tracker.publisher.exchange import Message, check_alike, decode_message
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import PublisherHeartbeatWriter
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.tracker.rank_group import RankGroup
from delta_tracker.types import Delta


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an attempt to publish a version.

    Args:
        manifest: manifest of the version; None if the version was not published.
        error: error of the attempt; None if the version was published.
        read: uncommitted read of the version's rows; None if this rank read no rows.
    """

    manifest: Manifest | None = None
    error: Exception | None = None
    read: Delta | None = None


class Delivery:
    """Writer of versions in background threads. It writes and commits each version after its rows have been read.

    Each rank writes its parts and sends a description of them to rank 0. Rank 0 commits the version and sends the
    outcome to all ranks. In the meantime, the ranks exchange keep-alive messages. A dead rank is therefore detected at
    once, and a suspended rank within the timeout.

    Args:
        writer: writer of this rank's parts. On rank 0, it also commits the versions.
        group: process group of all ranks. No other object may use it.
        seconds: interval between keep-alive messages in seconds.
        committed: functions to call on rank 0 with the manifest of each committed version. They are called in a
            background thread. If the outcome of a commit is unknown, they are called again with the previous manifest.

    Attributes:
        worker: executor of the thread that writes and commits versions.
    """

    def __init__(
        self,
        writer: Coordinator,
        group: RankGroup,
        seconds: float,
        committed: Iterable[Callable[[Manifest], object]],
        runtime: Runtime,
    ) -> None:
        self._writer = writer
        self._group = group
        self._seconds = seconds
        self._committed = committed
        self.worker = runtime.executor("publisher")
        self._messenger = runtime.executor("publisher-exchange")

    def start(self, outcome: Future[Outcome], number: int, draft: Draft | Exception, read: Delta | None = None) -> None:
        """Start writing and committing a version. If the call is interrupted, repeat it with the same ``outcome``.

        Args:
            outcome: future whose result is set when the version has been published or has failed.
            number: number of the vote in which the ranks decided to read the rows. It is the same on all ranks.
            draft: this rank's data for the version, or the error that occurred when the rank read its rows.
            read: uncommitted read of the version's rows.
        """

        def run() -> None:
            if outcome.done():  # the first call was interrupted after it had started this
                return
            try:
                if self._group.world_size == 1:
                    share = self._writer.write(draft)
                    found = self._ended(share, self._commit(draft, share, {}))
                else:
                    job, rounds = self.worker.submit(self._writer.write, draft), MessageRounds(self._group, number)
                    found = self._lead(rounds, draft, job) if self._group.rank == 0 else self._send(rounds, job)
            except BaseException as error:  # noqa: BLE001  the training thread waits for an outcome, and reports it
                found = Outcome(error=self._leave_group(error))
            outcome.set_result(replace(found, read=read))

        (self.worker if self._group.world_size == 1 else self._messenger).submit(run)

    def close(self) -> None:
        """Complete the version in progress, stop the threads, and leave the process group."""
        self._messenger.shutdown()
        self.worker.shutdown()
        self._group.close()

    def _leave_group(self, error: BaseException) -> Exception | None:
        """Leave the group, because the ranks may expect different messages. Return the error to report."""
        if self._group.world_size == 1 and isinstance(error, Exception):
            return error
        self._group.leave(f"{type(error).__name__} while a version was completed: {error}")
        self._group.close()  # the other ranks notice it at once
        return self._group.lost

    def _lead(self, rounds: "MessageRounds", draft: Draft | Exception, job: Future[Message]) -> Outcome:
        """Collect the shares of all ranks, commit the version, and send the outcome. Only rank 0 calls this method."""
        shares: dict[int, bytes] = {}
        commit: Future[Message] | None = None
        try:
            while True:
                self._wait(commit or job)
                letters = rounds.collect()
                shares |= {rank: data for rank, data in letters.items() if data}
                if commit is None and job.done() and len(shares) == len(letters):
                    commit = self.worker.submit(self._commit, draft, job.result(), shares)
                    self._wait(commit)
                if commit is not None and commit.done():
                    rounds.send_answer(commit.result().data)
                    break
                rounds.send_answer()
        except RankLostError:
            if commit is None:
                raise
        return self._ended(job.result(), commit.result())

    def _send(self, rounds: "MessageRounds", job: Future[Message]) -> Outcome:
        is_sent = False
        while True:
            if not is_sent:
                self._wait(job)
            share = b"" if is_sent or not job.done() else job.result().data
            rounds.send(share)
            is_sent = is_sent or bool(share)
            if outcome := rounds.receive():
                return self._ended(job.result(), Message.of(partial(decode_message, 0, outcome)))

    def _wait(self, job: Future[Any]) -> None:
        wait([job], self._seconds)

    def _commit(self, draft: Draft | Exception, share: Message, others: Mapping[int, bytes]) -> Message:
        """Commit the version. Return the message to send to all ranks, which contains the last entry or an error."""

        def act() -> dict[str, object]:
            if share.failure is not None:
                raise share.failure
            assert not isinstance(draft, Exception), "its share has this failure"
            shares = [share.content]
            if others:
                shares += [decode_message(rank, others[rank]) for rank in sorted(others)]
                check_alike(shares, "cut", "tables")
            try:
                self._report(self._writer.commit(draft, shares))
            except UnknownOutcomeError:
                self._report(self._writer.head)  # so that the pointer's thread looks for a later entry
                raise
            return self._writer.head_message()

        return Message.of(act)

    def _report(self, entry: Manifest) -> None:
        for each in self._committed:
            each(entry)

    def _ended(self, share: Message, message: Message) -> Outcome:
        failure = share.failure or message.failure
        if failure is None:
            try:
                return Outcome(self._writer.set_head(message.content))
            except Exception as error:  # noqa: BLE001  the training thread reports it
                failure = error
        if isinstance(failure, LostEntryError):
            self._writer.lost(failure)
        return Outcome(error=failure)


class MessageRounds:
    """Messages that the ranks exchange to complete a version.

    In each round, every rank sends a message to rank 0, and rank 0 answers all ranks. A message with data describes the
    parts of the rank, an answer with data the outcome. Messages and answers without data are keep-alives.

    All methods raise RankLostError if a rank died, did not respond in time, or is at a different version.

    Args:
        number: number of the vote in which the ranks decided to read the rows.
    """

    def __init__(self, group: RankGroup, number: int) -> None:
        self._group = group
        self._number = number

    def collect(self) -> dict[int, bytes]:
        """Receive a message from each of the other ranks, and return the data by rank. Call it on rank 0 only."""
        headers = self._group.gather(self._header())
        return {rank: self._opened(headers[rank], rank) for rank in range(1, len(headers))}

    def send(self, data: bytes = b"") -> None:
        """Send a message to rank 0."""
        self._group.gather(self._header(data))
        if data:
            self._group.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)

    def send_answer(self, data: bytes = b"") -> None:
        """Send an answer to all ranks. Call this method on rank 0 only."""
        self._group.send_all(self._header(data))
        if data:
            self._group.send_all(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Wait for the answer from rank 0, and return its data."""
        header = self._header()
        self._group.receive(header, 0)
        return self._opened(header, 0)

    def _header(self, data: bytes = b"") -> Tensor:
        """Return the header of a message: the number of the vote and the length of ``data``, ``[2]`` int64."""
        return torch.tensor([self._number, len(data)], device="cpu")

    def _opened(self, header: Tensor, rank: int) -> bytes:
        """Receive the data of the message from ``rank`` whose header is ``header``, and return it."""
        number, length = header.tolist()
        if number != self._number:
            own = f"rank {self._group.rank} at cut {self._number}"
            reason = f"rank {rank} is at cut {number} of this publisher, and {own}"
            self._group.leave(reason)
            raise RankLostError(reason)
        data = torch.empty(length, dtype=torch.uint8, device="cpu")
        if length:
            self._group.receive(data, rank)
        return data.numpy().tobytes()


class PublisherHeartbeats:
    """Writer of a publisher's heartbeats in a background thread.

    Heartbeats are written only when the training thread calls :meth:`write_if_due` or :meth:`wait`. If training hangs,
    the heartbeats stop, and a standby detects the failure.

    Args:
        storage: store of the stream.
        seconds: interval between heartbeats in seconds. The first heartbeat is written this long after the claim.
    """

    def __init__(self, storage: Storage, seconds: float, runtime: Runtime) -> None:
        self._seconds = seconds
        self._writer = PublisherHeartbeatWriter(storage, seconds)
        self._worker = runtime.executor("publisher-heartbeat")
        # Start the thread now: a system that has no more threads must not fail training later.
        self._job: Future[None] = self._worker.submit(lambda: None)

    def write_if_due(self, head: Manifest) -> None:
        """Start writing a heartbeat if one is due and no other is being written. Does not wait for the store."""
        if self._writer.is_due() and self._job.done():
            self._job = self._worker.submit(self._writer.write, head)

    def wait(self, job: Future[Any], head: Manifest) -> None:
        """Wait until ``job`` is done. Write heartbeats that become due in the meantime."""
        while not job.done():
            self.write_if_due(head)
            wait([job], self._seconds)

    def close(self) -> None:
        """Wait for the heartbeat in progress, and stop the thread."""
        self._worker.shutdown()
