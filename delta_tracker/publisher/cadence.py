"""Bounds that determine when ``Publisher.step`` publishes."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from delta_tracker.arguments import is_number, refuses_unknown
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.tracker.tracker import ModelDeltaTracker

# A vote takes about 0.6 ms of processor time on each rank and 0.05 more for each rank of the job, measured with 2 to 32
# ranks on two busy cores: so many ranks per call keep the votes below 1.5 ms for each call of step().
_RANKS_PER_CALL = 16
_MAX_CALLS_PER_VOTE = 16


@refuses_unknown()
@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Schedule of :meth:`Publisher.step`. A version starts when at least one rank has reached one of the bounds.

    Rows and bytes are counted on each rank separately. Tables without a fused optimizer are not counted.

    All ranks vote at every ``vote_every``-th call of :meth:`Publisher.step`, and act on the votes at the next such
    call. A single rank acts at once. For the bound ``batches``, or on a single rank, a version starts at most
    ``vote_every - 1`` calls late. For the other bounds on several ranks, it starts at most ``2 * vote_every - 1`` calls
    late. The delay is longer if the previous version is still in progress. A delta that has started is committed
    without more calls. For a snapshot, the rows that change while all rows are copied are read at a later vote.

    Args:
        batches: bound on the number of batches since the last version.
        seconds: bound on the seconds since the last version, measured on rank 0.
        rows: bound on the number of pending rows on one rank.
        num_bytes: bound on the size in bytes of the pending rows' values on one rank, in the tables' dtypes.
        snapshot_every: interval between two snapshots, in versions. It is counted from the newest snapshot in the
            stream, which may come from an earlier publisher or from :meth:`Publisher.snapshot`. Claims count as
            versions. Merged snapshots do not count as snapshots. None publishes snapshots only when they are required.
        vote_every: interval between two votes, in calls of :meth:`Publisher.step`. It must be the same on all ranks. If
            None, it is the number of ranks divided by 16, rounded up, but at most 16.

    Raises:
        InvalidArgumentError: if an argument is not a positive finite number, if an argument other than ``seconds`` is
            not an integer, or if ``batches``, ``seconds``, ``rows`` and ``num_bytes`` are all None.

    Example:
        >>> Cadence(batches=100, seconds=60).batches
        100
    """

    batches: int | None = None
    seconds: float | None = None
    rows: int | None = None
    num_bytes: int | None = None
    snapshot_every: int | None = None
    vote_every: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            bound = getattr(self, field.name)
            is_whole = field.name == "seconds" or isinstance(bound, int)
            if bound is not None and not (is_number(bound) and is_whole and bound > 0):
                raise InvalidArgumentError(field.name, bound, "Pass a positive number")
        if all(bound is None for bound in (self.batches, self.seconds, self.rows, self.num_bytes)):
            raise InvalidArgumentError("Cadence", "no bound", "Pass one of batches, seconds, rows and num_bytes")

    def calls_per_vote(self, world_size: int) -> int:
        """Return ``vote_every``. If it is None, return the default for ``world_size`` ranks."""
        if self.vote_every is not None:
            return self.vote_every
        return min(-(-world_size // _RANKS_PER_CALL), _MAX_CALLS_PER_VOTE)


class CadenceProgress:
    """Progress of one rank towards the bounds of a cadence since the start of the last version.

    Counting pending rows exactly is slow. It is done only if the last exact count plus the number of rows recorded
    since then reaches a bound.

    Args:
        consumer: name of the consumer whose pending rows are counted.
        num_batches: number of batches between a call of :meth:`is_due` that returns True and the start of the version.
    """

    def __init__(
        self, cadence: Cadence, tracker: ModelDeltaTracker, consumer: str, *, num_batches: int, runtime: Runtime
    ) -> None:
        self._monotonic = runtime.monotonic
        self._cadence = cadence
        self._num_batches = num_batches
        self._tracker = tracker
        self._consumer = consumer
        self.restart()
        self._batch = 0

    def restart(self) -> None:
        """Reset all counts. Call this method when a version starts."""
        self._batch = self._tracker.num_batches
        self._time = self._monotonic()
        self._set_counted({})

    def wants_snapshot(self, head: Manifest) -> bool:
        """Return True if the version after ``head`` must be a snapshot because of ``snapshot_every``.

        Snapshots of earlier publishers also count, so a resumed trainer need not start with a snapshot.
        """
        every = self._cadence.snapshot_every
        return every is not None and (head.snapshot is None or head.version + 1 - head.snapshot >= every)

    def is_due(self, *, is_clock: bool) -> bool:
        """Return True if a version is due: a bound is reached, or ``batches`` will be reached when the version starts.

        Args:
            is_clock: True to also check the bound ``seconds``. Only rank 0 passes True.
        """
        cadence, tracker = self._cadence, self._tracker
        if cadence.batches is not None and tracker.num_batches + self._num_batches - self._batch >= cadence.batches:
            return True
        if is_clock and cadence.seconds is not None and self._monotonic() - self._time >= cadence.seconds:
            return True
        if self._num_attached != tracker.live.num_attached:  # the counts may include tables that left the model
            self._set_counted(tracker.num_pending(self._consumer))
        counted, before = self._counted, self._recorded
        most = {fqn: counted.get(fqn, 0) + n - before.get(fqn, 0) for fqn, n in tracker.progress.num_recorded.items()}
        if not self._reaches(most):
            return False
        self._set_counted(tracker.num_pending(self._consumer))
        return self._reaches(self._counted)

    def _set_counted(self, counted: Mapping[str, int]) -> None:
        self._counted, self._recorded = counted, self._tracker.progress.num_recorded
        self._num_attached = self._tracker.live.num_attached

    def _reaches(self, num_rows: Mapping[str, int]) -> bool:
        cadence = self._cadence
        if cadence.rows is not None and sum(num_rows.values()) >= cadence.rows:
            return True
        if cadence.num_bytes is None:
            return False
        sizes = [
            num_rows.get(fqn, 0) * shard.num_columns * shard.table.dtype.itemsize
            for fqn, shard in self._tracker.shards.items()
        ]
        return sum(sizes) >= cadence.num_bytes
