"""Training state at each cut, and the positions of the other consumers relative to the earlier cuts."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Collection, Mapping

import torch

from delta_tracker.errors import InvalidArgumentError, UnfinishedStepError
from delta_tracker.publisher.schemas import Schemas
from delta_tracker.publisher.training import ConsumerState, Recovery, TakenState, TrainingSource
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.tracker.consumer_handle import ConsumerHandle
from delta_tracker.tracker.live_tables import LiveTables
from delta_tracker.tracker.progress import Progress
from delta_tracker.tracker.top_k import TopK

_logger = logging.getLogger(__name__)

_TESTED = frozenset({"EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"})
# Longest waits of training for an update in progress: the first one, and those after a wait that was in vain. A graph
# that the training thread itself holds does not end while it waits.
_UPDATE_SECONDS = 5.0
_AGAIN_SECONDS = 0.05


class TrainingCuts:
    """Training states of this rank at the cuts of its versions. ``handle`` is that of the publisher's consumer.

    The constructor raises the errors of :class:`TrainingSource`.
    """

    def __init__(
        self,
        live: LiveTables,
        progress: Progress,
        handle: ConsumerHandle,
        recovery: Recovery,
        schemas: Schemas,
        *,
        is_first: bool,
    ) -> None:
        self._live = live
        self._progress = progress
        self._handle = handle
        self._source = TrainingSource(
            live, progress, recovery, collisions=schemas.collisions, is_first=is_first, publisher=handle.name
        )
        self._watch = live.watch_states()
        self._waited_in_vain = False
        # Updates before the first step, such as a warm-up, belong to the state from which training begins.
        self._start = progress.num_batches, progress.num_unstepped
        self._cuts: list[tuple[int, int]] = []  # log position and version of earlier cuts, ascending
        if untested := sorted({each.optimizer for each in schemas.latest.states.values()} - _TESTED):
            _logger.warning("the published states of these optimizers have not been tested: %s", ", ".join(untested))

    def begin(self, meanwhile: ConsumerHandle | None) -> None:
        """Wait for updates in progress, and find states that were written in place since the last cut.

        Their rows become pending for the publisher's consumer and for ``meanwhile``.

        Raises:
            UnfinishedStepError: if an update is still in progress after the wait, or rows were updated since the last
                step of the tracker.
            InvalidArgumentError: if the data position does not follow training.
        """
        progress = self._progress
        seconds = _AGAIN_SECONDS if self._waited_in_vain else _UPDATE_SECONDS
        self._waited_in_vain = True
        self._handle.wait_for_updates(seconds)
        self._waited_in_vain = False
        num_batches, num_before = self._start
        if progress.num_unstepped > (num_before if progress.num_batches == num_batches else 0):
            raise UnfinishedStepError(
                f"they are not those after batch {progress.num_batches}, because they were updated since the last "
                "tracker.step()",
                "Call in each batch, in this order: backward(), optimizer.step(), scheduler.step(), tracker.step(), "
                "publisher.step()",
            )
        if progress.data_position is not None:
            progress.data_position.check()
        for fqn in self._watch.written():
            shard = self._live.shards[fqn]
            every = torch.arange(shard.num_rows, device=self._live.state_views(fqn)[0][0].device)
            for handle in (self._handle, meanwhile):
                if handle is not None:
                    handle.distrust(fqn, every)

    def take(self, published: Collection[str]) -> TakenState:
        """Return the training state of this rank. The arguments and errors are those of :meth:`TrainingSource.take`."""
        return self._source.take(self._consumers(), published)

    def add(self, position: int, version: int) -> None:
        """Note the log position of the cut of a committed version."""
        self._cuts.append((position, version))

    def _consumers(self) -> dict[str, ConsumerState]:
        """Return the pending rows of the other consumers, relative to the versions of this publisher.

        The position of a consumer's own stream is of the same time.
        """

        def num_cuts(position: int) -> int:
            return bisect_right(self._cuts, position, key=lambda cut: cut[0])

        others = self._handle.others()
        oldest = min((position for position, _ in others.values()), default=self._handle.position)
        del self._cuts[: max(0, num_cuts(oldest) - 1)]
        found = {}
        for name, (position, carried) in others.items():
            number = num_cuts(position)
            left_out = {fqn: ids + self._live.shards[fqn].row_offset for fqn, ids in carried.items()}
            note = self._handle.note_of(name)
            place = note if isinstance(note, Mapping) else None
            found[name] = ConsumerState(self._cuts[number - 1][1] if number else None, left_out, place)
        return found


def check_recoverable(live: LiveTables, encodings: Mapping[str, Encoding], top_k: TopK | None) -> None:
    """Raise an error if the versions of a publisher cannot have the complete training state."""
    if top_k is not None:
        raise InvalidArgumentError("top_k", top_k, "Pass None: a version with states has all changed rows")
    for fqn, table in live.tables.items():
        if encodings[fqn] is not Encoding.of(table.dtype):
            remedy = f"Leave {fqn!r} out: a version with states has the rows in the table's dtype"
            raise InvalidArgumentError("encoding", str(encodings[fqn]), remedy)
    live.check_recoverable()
