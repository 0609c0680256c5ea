"""Read a consumer's delta: what the log has for it, the rows' values and states, and the choice of top-k.

Letters: ``N`` rows of a table, ``D`` columns of its shard.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from delta_tracker.buffers import new_rows
from delta_tracker.errors import InvalidArgumentError, UnsupportedTableError
from delta_tracker.rows import ChangedRows
from delta_tracker.sharding.discover import LocalShard
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.sharding.weights import num_optimizer_states, read_optimizer, read_rows, row_chunks
from delta_tracker.tracker.change_log import ChangeLog, Reading
from delta_tracker.tracker.modes import Capture
from delta_tracker.tracker.profiling import profiler_range
from delta_tracker.tracker.top_k import AllRanks, Candidates, TopK, choose
from delta_tracker.tracker.tracked_model import TrackedModel
from delta_tracker.types import Delta, DeltaRows

_ID_BYTES = 8
_CHUNK_ROWS = 1 << 15  # of 64 numbers: eight megabytes, which stay in a large cache


class DeltaReader:
    """Reads the deltas of a log's consumers, in one tracking mode.

    Args:
        log: what changed.
        model: what the rows hold now.
        capture: the mode's strategy.
    """

    def __init__(self, log: ChangeLog, model: TrackedModel, capture: Capture) -> None:
        self._log = log
        self._model = model
        self._capture = capture
        self._ranks: AllRanks | None = None  # made at the first top-k, which all ranks take part in

    def read(
        self,
        consumer: str,
        *,
        commit: bool,
        with_states: bool,
        with_values: bool,
        with_optimizer: bool,
        top_k: TopK | None,
        ranks: AllRanks | None = None,
    ) -> Delta:
        """Read a consumer's delta; the arguments and errors are those of ``ModelDeltaTracker.get_delta``.

        Args:
            consumer: the name of a consumer, which the caller may read.
            commit: commit the read at once.
            with_states: add the old states, in a mode that has them.
            with_values: add the rows as they are now.
            with_optimizer: add the fused optimizer's states of the rows.
            top_k: choose among the rows. The read is a collective then.
            ranks: who shares the budget of ``top_k``; None for a group that the first such read joins.
        """
        with self._log.lock, one_cut(), profiler_range("delta_tracker: read"):
            try:
                self._model.check_attached()
                self.check(top_k, with_optimizer=with_optimizer)
                reading = self._log.read(consumer, with_states=with_states or top_k is not None)
            except Exception as error:
                if isinstance(top_k, TopK):
                    self._choose(error, top_k, ranks)  # the other ranks wait for this one
                raise
            try:
                chosen = {} if top_k is None else self._choose(reading.rows, top_k, ranks)
                delta = self._delta(
                    reading,
                    chosen,
                    with_states=with_states,
                    with_values=with_values,
                    with_optimizer=with_optimizer,
                )
            except BaseException:
                self._log.discard()
                raise
            self._log.seal(delta, commit=commit)
            return delta

    def check(self, top_k: TopK | None, *, with_optimizer: bool) -> None:
        """Refuse what no read of these shards could serve, before anything is cut.

        Raises:
            UnsupportedTableError: for ``with_optimizer`` where a table's optimizer is not fused.
            InvalidArgumentError: for a ``top_k`` that is no TopK, or has no score in a mode that has none.
        """
        if top_k is not None and not isinstance(top_k, TopK):
            raise InvalidArgumentError("top_k", top_k, "Pass a TopK")
        for fqn, shard in self._model.shards.items():
            if with_optimizer and not shard.is_fused:
                raise UnsupportedTableError(fqn, "its optimizer is not fused, so its rows' states are not at hand")
        if top_k is not None and top_k.score is None and not self._capture.has_scores:
            raise InvalidArgumentError("top_k", top_k, "Track in EMBEDDING or a momentum mode, or give TopK a score")

    def _delta(
        self,
        reading: Reading,
        chosen: Mapping[str, Tensor],
        *,
        with_states: bool,
        with_values: bool,
        with_optimizer: bool,
    ) -> Delta:
        """Return the delta of a read, from the rows as they are now.

        Args:
            reading: what the log has.
            chosen: FQN to ``[N]`` bool, for the tables of which not all rows go.
            with_states: as of :meth:`read`, as the others.
            with_values: as above.
            with_optimizer: as above.
        """
        rows, left_out = {}, {}
        for fqn, changed in reading.rows.items():
            if fqn in chosen:
                left_out[fqn] = changed.take(~chosen[fqn], new_rows)
            sent = changed if with_states else changed.without_states()
            if fqn in chosen:
                sent = sent.take(chosen[fqn], new_rows)
            elif fqn in reading.shared:
                sent = sent.copy(new_rows)
            rows[fqn] = self._rows(
                fqn, sent, with_states=with_states, with_values=with_values, with_optimizer=with_optimizer
            )
        return Delta(
            rows,
            consumer=reading.consumer,
            start=reading.start,
            stop=reading.stop,
            batches=reading.batches,
            left_out=left_out,
        )

    def _rows(
        self, fqn: str, changed: ChangedRows, *, with_states: bool, with_values: bool, with_optimizer: bool
    ) -> DeltaRows:
        shard = self._model.shards[fqn]
        return DeltaRows(
            changed.ids,
            self._capture.states(shard, changed) if with_states else None,
            read_rows(shard, changed.ids) if with_values else None,
            shard=shard.spec,
            known=changed.known,
            optimizer=read_optimizer(shard, changed.ids) if with_optimizer and num_optimizer_states(shard) else (),
        )

    def _choose(
        self, rows: Mapping[str, ChangedRows] | Exception, top_k: TopK, ranks: AllRanks | None
    ) -> dict[str, Tensor]:
        """FQN to ``[N]`` bool: which rows go. A collective.

        Args:
            rows: the changed rows, or why this rank cannot read them, which the other ranks must learn.
            top_k: the budget.
            ranks: who shares it.

        Raises:
            InvalidArgumentError: if scores are NaN or of another shape, or if another rank failed.
            Exception: ``rows``, if it is one.
        """
        if ranks is None:
            ranks = self._ranks = self._ranks or AllRanks()
        candidates: dict[str, Candidates] | Exception
        if isinstance(rows, Exception):
            candidates = rows
        else:
            # A table that every rank holds is chosen from once.
            local = [fqn for fqn in rows if ranks.rank == 0 or not self._model.shards[fqn].spec.is_replicated]
            try:
                candidates = {fqn: self._candidates(fqn, rows[fqn], top_k) for fqn in local}
            except Exception as error:  # noqa: BLE001  the other ranks wait: choose() tells them, then raises it
                candidates = error
        try:
            return choose(top_k, candidates, list(self._model.shards), ranks)
        except BaseException as error:
            if not isinstance(error, Exception):
                ranks.leave()
            raise

    def _candidates(self, fqn: str, changed: ChangedRows, top_k: TopK) -> Candidates:
        spec = self._model.shards[fqn].spec
        if top_k.score is not None:
            # A copy: the score may write to it.
            rows = self._rows(fqn, changed.copy(new_rows), with_states=True, with_values=True, with_optimizer=False)
            scores = self._checked_scores(fqn, top_k.score(fqn, rows), changed)
        else:
            scores = self._scores(self._model.shards[fqn], changed)
        is_due = torch.zeros_like(changed.ids, dtype=torch.bool)
        if top_k.max_age is not None and changed.ages is not None:
            is_due = changed.ages >= top_k.max_age
        return Candidates(scores, is_due, spec.num_columns * spec.table.dtype.itemsize + _ID_BYTES)

    def _scores(self, shard: LocalShard, changed: ChangedRows) -> Tensor:
        """How far rows moved, ``[N]`` float32, chunk by chunk, so that no copy of all rows is made."""
        states = self._capture.states(shard, changed)
        assert states is not None, "every mode with scores has states"
        scores = torch.empty(len(changed), dtype=torch.float32, device=changed.ids.device)
        for chunk, values in row_chunks(shard, changed.ids, _CHUNK_ROWS):
            scores[chunk] = self._capture.scores(values, states[chunk])
        # Not a number: the row's old state is unknown, or the row itself diverged. Either way it goes first.
        return torch.where(scores.isnan(), torch.inf, scores)

    def _checked_scores(self, fqn: str, scores: Tensor, rows: ChangedRows) -> Tensor:
        """Numbers for all rows; those whose old state is unknown, NaN itself, go first whatever their score."""
        if scores.shape == (len(rows),) and rows.known is not None:
            scores = torch.where(rows.known, scores, torch.inf)
        if scores.shape != (len(rows),) or bool(scores.isnan().any()):
            remedy = f"Return [{len(rows)}] numbers, none of them NaN"
            raise InvalidArgumentError(f"score of {fqn!r}", tuple(scores.shape), remedy)
        return scores.detach().to(torch.float32, copy=True)  # the next table's may come in the same memory
