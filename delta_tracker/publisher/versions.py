"""Version that a publisher writes, from the votes for it to its end: :class:`Versions`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from delta_tracker.errors import LostEntryError, NeedsSnapshotError, RankFailedError, RankLostError
from delta_tracker.publisher.cadence import Pace
from delta_tracker.publisher.coordinator import Coordinator, Draft
from delta_tracker.publisher.delivery import Delivery, Outcome
from delta_tracker.publisher.exchange import Ballots, Phase, Vote
from delta_tracker.publisher.flight import Call, Copying, Cut, Ended, Flight, Step, decide
from delta_tracker.publisher.heartbeats import Heartbeats
from delta_tracker.publisher.reports import Reports
from delta_tracker.publisher.version_source import VersionSource
from delta_tracker.stream.format.manifest import Kind, Part
from delta_tracker.types import Delta

_logger = logging.getLogger(__name__)


class Versions:
    """State of the version that this rank writes. Only the training thread calls the methods.

    All ranks begin a version and make its cut after the same votes, and so at the same batch. After the cut, the
    training thread only ends the read, at a later vote.

    An exception such as KeyboardInterrupt may end any method. The next call then completes what this rank owes to the
    others: it counts the same votes again, and a version without this rank's contents fails on all ranks.

    Args:
        source: rows of the versions.
        writer: writer of the stream.
        ballots: votes of the ranks.
        delivery: completes the versions after their cut.
        reports: receives the results.
        pace: bounds of the cadence; None to begin no version in :meth:`step`.
        beats: heartbeats of the publisher; None without them.
    """

    def __init__(
        self,
        source: VersionSource,
        writer: Coordinator,
        ballots: Ballots,
        delivery: Delivery,
        reports: Reports,
        pace: Pace | None,
        beats: Heartbeats | None,
    ) -> None:
        self._source = source
        self._writer = writer
        self._ballots = ballots
        self._delivery = delivery
        self._reports = reports
        self._pace = pace
        self._beats = beats
        self._flight: Flight | None = None
        self._num_cuts = 0
        self._call: Call | None = None  # call that has not returned
        self._begun = 0, Step.REST  # the last beginning of a version, and the number of the votes for it

    @property
    def has_cadence(self) -> bool:
        """True if :meth:`step` can begin a version."""
        return self._pace is not None

    def call(self) -> None:
        """Count a call of ``Publisher.step()``, which may owe the other ranks a vote from now on."""
        self._call = None
        self._ballots.call()

    def returned(self) -> None:
        """Note that a call of :meth:`publish` or :meth:`flush` ended, so that the same call begins another version."""
        self._call = None

    def step(self) -> None:
        """Send the votes that this rank owes, and act on those before them."""
        ballots = self._ballots
        while ballots.num_owed:  # several votes if the other ranks are ahead
            if ballots.is_pending:
                self._count()
            if self._reports.is_over:
                ballots.num_owed = 0  # this rank takes no part in versions any more
                return
            self._end_read()
            ballots.send(self._step_vote())
            if ballots.is_alone:
                self._count()

    def land(self) -> None:
        """Complete the version that has begun, if there is one, and report its result."""
        self.step()
        self._complete()
        self._ballots.settle()

    def publish(self, kind: Kind) -> None:
        """Publish a version, and report its result. A version that has begun is completed first."""
        wants_snapshot = kind == "snapshot"
        enough = {Step.SNAPSHOT} if wants_snapshot else {Step.SNAPSHOT, Step.DELTA}
        self._publish(lambda: self._vote(Phase.PUBLISHING, is_due=True, wants_snapshot=wants_snapshot), kind, enough)
        self.beat()

    def flush(self) -> None:
        """Publish all rows that have changed, if there are any on a rank, and report the result."""
        source = self._source
        self._publish(lambda: self._vote(Phase.FLUSHING, is_due=source.has_changes, is_complete=True), "flush", ())

    def beat(self) -> None:
        """Write a heartbeat if one is due, unless this publisher can publish no more."""
        if self._beats is not None and not self._reports.is_over:
            self._beats.beat(self._writer.head)

    def _publish(self, vote: Callable[[], Vote], name: str, enough: Collection[Step]) -> None:
        call, ballots = self._called(name), self._ballots
        if call.voted is None:
            self.step()
            if ballots.is_pending and self._begun[0] != ballots.number:
                call.last = ballots.number
            self._complete()
            ballots.settle()
            # What the votes of the last step have begun in this call, and so at this batch, on all ranks.
            is_enough = self._begun[0] == call.last and self._begun[1] in enough
            if self._reports.is_over:
                return
            if not is_enough:
                self._reports.begin()
                call.voted = ballots.number
        if call.voted == ballots.number:
            self._begin_by(vote)
        else:  # perhaps it was interrupted: the other ranks wait for the same version
            self._complete()
        if isinstance(self._reports.error, LostEntryError):  # all ranks repeat it
            self._begin_by(lambda: self._vote(Phase.PUBLISHING, is_due=True, wants_snapshot=True))

    def _called(self, name: str) -> Call:
        """Return the state of a call: that of the same call at the same batch, if it was interrupted."""
        try:
            batch = self._source.tracker.num_batches
        except Exception:  # noqa: BLE001  it comes again when this rank votes, for which the other ranks wait
            batch = -1
        if self._call is None or (self._call.name, self._call.batch) != (name, batch):
            self._call = Call(name, batch)
        return self._call

    def _begin_by(self, vote: Callable[[], Vote]) -> None:
        """Vote to begin a version, and complete it."""
        try:
            own = vote()
        except Exception as error:  # noqa: BLE001  reported after the vote for which the other ranks wait
            self._ballots.send(Vote(Phase.FAILED))
            with suppress(RankFailedError, RankLostError):
                self._ballots.count()
            self._ballots.clear()
            self._failed(error)
        else:
            self._ballots.send(own)
            self._complete()

    # Votes

    def _vote(self, phase: Phase, *, is_due: bool, wants_snapshot: bool = False, is_complete: bool = False) -> Vote:
        source = self._source
        vote = self._writer.vote(phase, *source.place())
        wants_snapshot = wants_snapshot or source.needs_snapshot or self._writer.needs_snapshot
        is_complete = is_complete or source.is_repairing
        return vote._replace(is_due=is_due, wants_snapshot=wants_snapshot, is_complete=is_complete)

    def _step_vote(self) -> Vote:
        """Return this rank's vote in :meth:`step`."""
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
        """Count the votes that were sent, and do what they decide."""
        ballots = self._ballots
        # While another rank writes, this publisher is alive. Before a version is begun, the other ranks may hang.
        meanwhile = None if self._flight is None or self._beats is None else self.beat
        try:
            count = ballots.count(meanwhile)
        except (RankFailedError, RankLostError) as error:
            ballots.clear()
            if isinstance(self._flight, Copying):
                self._flight = None
                self._close_read(Outcome(error=error))
            self._failed(error)
            return
        step = decide(self._flight, ballots.number, count.most)
        if step is not Step.WAIT and isinstance(self._flight, Ended):
            self._report(self._flight)
        if isinstance(self._flight, Copying) and step is Step.CUT:
            self._cut("snapshot", copied=self._flight.job, is_complete=False)
        elif step in (Step.SNAPSHOT, Step.DELTA) and not self._reports.is_over:
            try:
                if not count.is_alike:
                    self._writer.compare_places(*self._source.place())
            except (RankFailedError, RankLostError) as error:
                self._failed(error)
            else:
                self._begin(step, is_complete=count.most.is_complete)
        ballots.clear()

    # States

    def _complete(self) -> None:
        """Vote, wait and act until no version is being published."""
        while self._flight is not None or self._ballots.is_pending:
            flight = self._flight
            if self._ballots.is_pending:
                self._count()
            elif isinstance(flight, Copying):
                self._wait(self._copy(flight))
                self._ballots.send(Vote(Phase.COPYING))
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
        self._begun = self._ballots.number, step
        if step is Step.DELTA:
            # Not deferred: with top_k its read is a collective, which the other ranks have started.
            self._source.expect_read(is_complete=is_complete)
            self._cut("delta", copied=None, is_complete=is_complete)
        else:
            self._flight = copying = Copying(self._ballots.number)
            self._copy(copying)
        if self._pace is not None:
            self._pace.restart()

    def _copy(self, copying: Copying) -> Future[Part | None]:
        """Start to track changes, and to copy and write all rows of the tables with a fused optimizer, unless done."""
        if copying.job is not None:
            return copying.job
        try:
            source, writer = self._source, self._writer
            rows, form = source.copy(), source.schemas.copying.format
            job = self._delivery.submit(lambda: writer.write_part(rows, form=form) if rows else None)
        except Exception as error:  # noqa: BLE001  raised at the cut, which sends it to the other ranks
            job = Future()
            job.set_exception(error)
        copying.job = job
        return job

    def _cut(self, kind: Kind, *, copied: Future[Part | None] | None, is_complete: bool) -> None:
        """Read the rows of a version, and let the threads complete it."""
        number = self._num_cuts + 1
        cut = Cut(
            after=self._ballots.number,
            number=number,
            kind=kind,
            batch=self._source.tracker.num_batches,
            is_complete=is_complete,
            copied=copied,
        )
        self._flight, self._num_cuts = cut, number
        self._start(cut)

    def _start(self, cut: Cut) -> None:
        """Read the rows of a version, and let the threads complete it. They do not do so already.

        After an interrupt, the rows are read again at the same batch. Later, they belong to another version. A read
        that was a collective is not repeated, because the other ranks have ended theirs.
        """
        can_read = not cut.is_tried or self._can_repeat(cut)
        cut.is_tried = True
        draft: Draft | Exception
        read: Delta | None = None
        try:
            if can_read:
                part = None if cut.copied is None else cut.copied.result()
                draft, read = self._source.cut(cut.kind, part, is_complete=cut.is_complete)
            else:
                draft = RankFailedError(self._writer.rank, "an interrupt")
        except NeedsSnapshotError as error:  # dropped since the vote
            draft = error.advising("Publish again: the next version is a snapshot")
        except Exception as error:  # noqa: BLE001  sent to the other ranks with the share, then raised
            draft = error
        self._source.fail_expected_read()  # the other ranks may wait for this one
        self._delivery.start(cut.outcome, cut.number, draft, read)
        cut.is_started = True

    def _can_repeat(self, cut: Cut) -> bool:
        """Return True if the rows of a version can be read again after an interrupt."""
        source = self._source
        is_same = cut.batch == source.tracker.num_batches and source.can_read(cut.kind, is_complete=cut.is_complete)
        return is_same or self._ballots.is_alone

    def _end_read(self) -> None:
        """Commit or abort the read of a version whose outcome is known."""
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
            self._source.end(outcome.read, outcome.manifest)
        except Exception:
            _logger.exception("the read of a version could not be ended: the next one replaces it")

    def _report(self, ended: Ended) -> None:
        """Report a version that has ended on all ranks."""
        outcome = ended.outcome
        if outcome.manifest is not None:
            self._reports.published(outcome.manifest)
        else:
            assert outcome.error is not None, "one of both"
            self._failed(outcome.error)
        self._flight = None

    def _failed(self, error: Exception) -> None:
        self._reports.failed(error, self._writer.head.version + 1)
