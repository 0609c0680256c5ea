"""State machine that publishes a version, from the first vote to the result: :class:`VersionStateMachine`.

The classes of states come first, then :func:`next_publish_step`, a pure function that selects the next step.
"""

import logging
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

from delta_tracker.errors import LostEntryError, NeedsSnapshotError, RankFailedError, RankLostError
from delta_tracker.publisher.cadence import CadenceProgress
from delta_tracker.publisher.coordinator import Coordinator, Draft
from delta_tracker.publisher.delivery import Delivery, Outcome, PublisherHeartbeats
from delta_tracker.publisher.exchange import Phase, Vote, VoteExchange
from delta_tracker.publisher.reports import Reports
from delta_tracker.publisher.tracker_reader import TrackerReader
from delta_tracker.stream.format.manifest import Kind, Part
from delta_tracker.types import Delta

_logger = logging.getLogger(__name__)
Publishes: TypeAlias = Literal["delta", "snapshot", "flush"]
"""What a call publishes: the changed rows, all rows, or for ``"flush"``, the changed rows if any rank has some."""


@dataclass(slots=True)
class Copying:
    """State of a snapshot before its cut: all rows of the tables with a fused optimizer are being copied and written.

    Rows that change in the meantime are read at the cut.

    Args:
        after: number of the vote that started the copy.
        job: future of the part that contains the copied rows. None if copying has not begun because of an interrupt.
    """

    after: int
    job: Future[Part | None] | None = None

    @property
    def is_working(self) -> bool:
        """True until all copied rows have been written."""
        return self.job is None or not self.job.done()


@dataclass(slots=True, kw_only=True)
class Cut:
    """State of a version after the decision to cut: this rank reads its rows, and background threads write them.

    Args:
        after: number of the vote in which the ranks decided on the cut. It is the same on all ranks.
        kind: ``"snapshot"`` or ``"delta"``.
        batch: number of batches trained on at the cut.
        is_complete: for a delta, True to read all changed rows despite ``top_k``.
        copied: future of the part that contains the copied rows of a snapshot; None for a delta.
        outcome: future of the result of the version.
        is_tried: True if this rank has started reading its rows.
        is_started: True if the background threads have received this rank's data.
    """

    after: int
    kind: Kind
    batch: int
    is_complete: bool = False
    copied: Future[Part | None] | None = None
    outcome: Future[Outcome] = field(default_factory=Future)
    is_tried: bool = False
    is_started: bool = False


@dataclass(slots=True)
class Call:
    """Progress of a call of ``publish()``, ``snapshot()`` or ``flush()``, which can be continued after an interrupt.

    Args:
        name: kind of the call.
        batch: number of batches trained on when the method was called.
        last: number of the last vote of ``step()`` if it was not counted before the method was called; otherwise None.
        voted: number of votes that this rank had sent when the vote of this call became due; None until then.
    """

    name: Publishes
    batch: int
    last: int | None = None
    voted: int | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """State of a version that this rank has completed or that has failed. Other ranks may still be completing it."""

    after: int
    outcome: Outcome


Flight: TypeAlias = Copying | Cut | Ended
"""State of the version that is being published."""


class Step(Enum):
    """Next action of all ranks, which depends on their votes."""

    WAIT = "a rank is still working"
    CUT = "the copies of all ranks are written"
    SNAPSHOT = "a snapshot is due"
    DELTA = "a delta is due"
    REST = "nothing is due"


_ENOUGH: Mapping[Publishes, Collection[Step]] = {
    "delta": (Step.SNAPSHOT, Step.DELTA),
    "snapshot": (Step.SNAPSHOT,),
    "flush": (),
}
"""For each kind of call, the steps that make it unnecessary to begin a version if they began one at the same batch."""


def next_publish_step(flight: Flight | None, votes: int, most: Vote) -> Step:
    """Return the next action of all ranks after vote ``votes``. ``most`` contains the maximum of each field."""
    if flight is not None and flight.after == votes:  # an interrupt came after these votes had been acted on
        return Step.WAIT
    if most.is_working or isinstance(flight, Cut):
        return Step.WAIT
    if isinstance(flight, Copying):
        return Step.CUT
    if not most.is_due:
        return Step.REST
    return Step.SNAPSHOT if most.wants_snapshot else Step.DELTA


@dataclass(slots=True, eq=False)
class VersionStateMachine:
    """State machine that publishes versions on this rank, according to the votes of all ranks.

    Only the training thread may call the methods. All ranks start and cut a version after the same votes, and therefore
    at the same batch. If a method is interrupted, for example by Ctrl-C, the next call counts the same votes again and
    continues. If this rank can no longer read its rows at the batch of the cut, the version fails on all ranks.

    Args:
        pace: progress towards the bounds of the cadence; None if :meth:`step` does not start versions.
        beats: writer of the publisher's heartbeats; None for no heartbeats.
    """

    _reader: TrackerReader
    _writer: Coordinator
    _exchange: VoteExchange
    _delivery: Delivery
    _reports: Reports
    _pace: CadenceProgress | None
    _beats: PublisherHeartbeats | None
    _flight: Flight | None = field(default=None, init=False)
    _call: Call | None = field(default=None, init=False)  # call that has not returned
    # the last beginning of a version, and the number of the votes for it
    _begun: tuple[int, Step] = field(default=(0, Step.REST), init=False)

    @property
    def has_cadence(self) -> bool:
        """True if :meth:`step` can start a version."""
        return self._pace is not None

    def count_call(self) -> None:
        """Count a call of ``Publisher.step()``. A vote may be due afterwards."""
        self._call = None
        self._exchange.count_call()

    def returned(self) -> None:
        """Record that a call of :meth:`publish` has returned, so that the next call publishes another version."""
        self._call = None

    def step(self) -> None:
        """Act on the votes that were sent before, and send the votes that are due."""
        exchange = self._exchange
        while exchange.num_owed:  # several votes if the other ranks are ahead
            if exchange.pending is not None:
                self._count()
            if self._reports.is_over:
                exchange.num_owed = 0  # this rank takes no part in versions any more
                return
            self._end_read()
            exchange.send(self._step_vote())
            if exchange.is_alone:
                self._count()

    def finish(self) -> None:
        """Complete the version in progress, if there is one, and report its result."""
        self.step()
        self._complete()
        self._exchange.send_owed_message()

    def publish(self, name: Publishes) -> None:
        """Complete a version in progress, publish a version as required by ``name``, and report the results."""
        batch = self._reader.tracker.num_batches
        if self._call is None or (self._call.name, self._call.batch) != (name, batch):
            self._call = Call(name, batch)
        call, exchange = self._call, self._exchange
        if call.voted is None:
            self.step()
            if exchange.pending is not None and self._begun[0] != exchange.number:
                call.last = exchange.number
            self._complete()
            exchange.send_owed_message()
            if self._reports.is_over:
                return
            # What the votes of the last step have begun in this call, and so at this batch, on all ranks.
            if not (self._begun[0] == call.last and self._begun[1] in _ENOUGH[name]):
                self._reports.error = None
                call.voted = exchange.number
        if call.voted == exchange.number:
            self._begin_by(name)
        else:  # perhaps it was interrupted: the other ranks wait for the same version
            self._complete()
        if isinstance(self._reports.error, LostEntryError):  # all ranks repeat it
            self._begin_by("snapshot")
        self.write_heartbeat_if_due()

    def write_heartbeat_if_due(self) -> None:
        """Start writing a heartbeat if one is due and this publisher can still publish versions."""
        if self._beats is not None and not self._reports.is_over:
            self._beats.write_if_due(self._writer.head)

    def _begin_by(self, name: Publishes) -> None:
        try:
            if name == "flush":
                own = self._vote(Phase.FLUSHING, is_due=self._reader.has_changes, is_complete=True)
            else:
                own = self._vote(Phase.PUBLISHING, is_due=True, wants_snapshot=name == "snapshot")
        except Exception as error:  # noqa: BLE001  reported after the vote for which the other ranks wait
            votes = self._exchange.send(Vote(Phase.FAILED))
            with suppress(RankFailedError, RankLostError):
                self._exchange.count(votes)
            self._exchange.pending = None
            self._failed(error)
        else:
            self._exchange.send(own)
            self._complete()

    # Votes

    def _vote(self, phase: Phase, *, is_due: bool, wants_snapshot: bool = False, is_complete: bool = False) -> Vote:
        reader, writer = self._reader, self._writer
        batch, schema = reader.batch_and_schema()
        wants_snapshot = wants_snapshot or reader.needs_snapshot or writer.needs_snapshot
        return Vote(phase, batch, schema.digest, is_due, wants_snapshot, is_complete or reader.is_repairing)

    def _step_vote(self) -> Vote:
        flight = self._flight
        if isinstance(flight, Copying):
            self._copy(flight)
            return Vote(Phase.COPYING, is_working=flight.is_working)
        if isinstance(flight, Cut) or self._pace is None:
            return Vote(Phase.STEPPING, is_working=flight is not None)
        try:
            is_due = self._pace.is_due(is_clock=self._writer.is_first)
            wants_snapshot = self._pace.wants_snapshot(self._writer.head)
            return self._vote(Phase.STEPPING, is_due=is_due, wants_snapshot=wants_snapshot)
        except Exception as error:  # noqa: BLE001  the other ranks wait for a vote
            self._failed(error)
            return Vote(Phase.STEPPING)

    def _count(self) -> None:
        exchange = self._exchange
        assert exchange.pending is not None, "send() came first"
        # While another rank writes, this publisher is alive. Before a version is begun, the other ranks may hang.
        meanwhile = None if self._flight is None or self._beats is None else self.write_heartbeat_if_due
        try:
            most, is_alike = exchange.count(exchange.pending, meanwhile)
        except (RankFailedError, RankLostError) as error:
            exchange.pending = None
            if isinstance(self._flight, Copying):
                self._flight = None
                self._close_read(Outcome(error=error))
            self._failed(error)
            return
        step = next_publish_step(self._flight, exchange.number, most)
        if step is not Step.WAIT and isinstance(self._flight, Ended):
            self._report(self._flight)
        if isinstance(self._flight, Copying) and step is Step.CUT:
            self._cut("snapshot", copied=self._flight.job, is_complete=False)
        elif step in (Step.SNAPSHOT, Step.DELTA) and not self._reports.is_over:
            try:
                if not is_alike:
                    self._writer.compare_cuts(*self._reader.batch_and_schema())
            except (RankFailedError, RankLostError) as error:
                self._failed(error)
            else:
                self._begin(step, is_complete=most.is_complete)
        exchange.pending = None

    # States

    def _complete(self) -> None:
        while self._flight is not None or self._exchange.pending is not None:
            flight = self._flight
            if self._exchange.pending is not None:
                self._count()
            elif isinstance(flight, Copying):
                self._wait(self._copy(flight))
                self._exchange.send(Vote(Phase.COPYING))
            elif isinstance(flight, Cut):
                if not flight.is_started:
                    self._start(flight)
                self._wait(flight.outcome)
                self._end_read()
            elif flight is not None:
                self._report(flight)

    def _wait(self, job: Future[Any]) -> None:
        if self._beats is None or self._reports.is_over:
            job.exception()  # waits, and costs less than futures.wait()
        else:
            self._beats.wait(job, self._writer.head)

    def _begin(self, step: Step, *, is_complete: bool) -> None:
        self._begun = self._exchange.number, step
        if step is Step.DELTA:
            # Not deferred: with top_k its read is a collective, which the other ranks have started.
            self._reader.expect_read(is_complete=is_complete)
            self._cut("delta", copied=None, is_complete=is_complete)
        else:
            self._flight = copying = Copying(self._exchange.number)
            self._copy(copying)
        if self._pace is not None:
            self._pace.restart()

    def _copy(self, copying: Copying) -> Future[Part | None]:
        if copying.job is not None:
            return copying.job
        try:
            reader, writer = self._reader, self._writer
            rows, form = reader.copy(), reader.tables.copying.format
            job = self._delivery.worker.submit(lambda: writer.write_part(rows, {}, form=form) if rows else None)
        except Exception as error:  # noqa: BLE001  raised at the cut, which sends it to the other ranks
            job = Future()
            job.set_exception(error)
        copying.job = job
        return job

    def _cut(self, kind: Kind, *, copied: Future[Part | None] | None, is_complete: bool) -> None:
        number, batch = self._exchange.number, self._reader.tracker.num_batches
        self._flight = cut = Cut(after=number, kind=kind, batch=batch, is_complete=is_complete, copied=copied)
        self._start(cut)

    def _start(self, cut: Cut) -> None:
        """Read the rows of a version, and let the threads complete it.

        Repeats an interrupted read only at the same batch, or with one rank, at any batch.
        """
        reader, batch = self._reader, self._reader.tracker.num_batches
        is_same = cut.batch == batch and reader.can_read(cut.kind, is_complete=cut.is_complete)
        can_read = not cut.is_tried or is_same or self._exchange.is_alone
        cut.is_tried = True
        draft: Draft | Exception
        read: Delta | None = None
        try:
            if can_read:
                part = None if cut.copied is None else cut.copied.result()
                draft, read = self._reader.cut(cut.kind, part, is_complete=cut.is_complete)
            else:
                draft = RankFailedError(self._writer.rank, "an interrupt")
        except NeedsSnapshotError as error:  # dropped since the vote
            draft = error.with_remedy("Publish again: the next version is a snapshot")
        except Exception as error:  # noqa: BLE001  sent to the other ranks with the share, then raised
            draft = error
        if isinstance(draft, Exception):
            self._reader.fail_expected_read()  # the other ranks may wait for this one
        self._delivery.start(cut.outcome, cut.after, draft, read)
        cut.is_started = True

    def _end_read(self) -> None:
        cut = self._flight
        if not isinstance(cut, Cut):
            return
        if not cut.is_started:
            self._start(cut)
        if cut.outcome.done():
            outcome = cut.outcome.result()
            self._flight = Ended(cut.after, outcome)
            self._close_read(outcome)

    def _close_read(self, outcome: Outcome) -> None:
        try:
            self._reader.end(outcome.read, outcome.manifest)
        except Exception:
            _logger.exception("the read of a version could not be ended: the next one replaces it")

    def _report(self, ended: Ended) -> None:
        outcome = ended.outcome
        if outcome.manifest is not None:
            self._reports.published(outcome.manifest)
        else:
            assert outcome.error is not None, "one of both"
            self._failed(outcome.error)
        self._flight = None

    def _failed(self, error: Exception) -> None:
        self._reports.failed(error, self._writer.head.version + 1)
