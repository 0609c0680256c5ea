"""Build the delta of a consumer's read: select changed rows by top-k, and add their values and states.

Notation: ``N`` is the number of changed rows of a table.
"""

from collections.abc import Callable, Mapping
from typing import TypedDict, TypeVar

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, UnsupportedModelError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.rows import ChangedRows, split_by_mask
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.weights import read_optimizer, read_rows, row_chunks
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.log_segments import profiler_range
from delta_tracker.tracker.modes import Capture
from delta_tracker.tracker.top_k import AllRanks, Candidates, TopK, choose
from delta_tracker.tracker.tracked_model import TrackedModel
from delta_tracker.types import Delta, DeltaRows

_T = TypeVar("_T")
_ID_BYTES = 8
_CHUNK_ROWS = 1 << 13  # 2 MiB for rows of 64 float32 columns, twice of which fit into a CPU cache


class ReadOptions(TypedDict, total=False):
    """Optional keyword arguments of a read, see :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.get_delta`."""

    commit: bool
    with_states: bool
    with_values: bool
    with_optimizer: bool
    top_k: TopK | None


class DeltaReader:
    """Reader that builds the deltas for the consumers of a tracker's change log.

    Args:
        log: the change log.
        model: the tracked model. Values and optimizer states are read from its shards.
        capture: implementation of the tracking mode.
    """

    def __init__(self, log: ChangeLog, model: TrackedModel, capture: Capture) -> None:
        self._log = log
        self._model = model
        self._capture = capture
        self._ranks: AllRanks | None = None  # created at the first read with top-k, in which all ranks participate

    def read(
        self,
        consumer: str,
        result: Callable[[Delta], _T],
        *,
        commit: bool = True,
        with_states: bool = True,
        with_values: bool = False,
        with_optimizer: bool = False,
        top_k: TopK | None = None,
        ranks: AllRanks | None = None,
    ) -> _T:
        """Read a consumer's pending rows, and return ``result(delta)``.

        If ``commit`` is True, the read is committed after ``result`` has returned. If ``result`` raises or the call is
        interrupted, the rows stay pending. Callers must first check that no other owner has reserved the consumer.
        ``ranks`` is the group of ranks that share the budget of ``top_k``. If it is None, all ranks share the budget,
        and the first read with ``top_k`` creates a process group for them. For the other arguments and the errors, see
        :meth:`~delta_tracker.tracker.tracker.ModelDeltaTracker.get_delta`.
        """
        consumers = self._log.consumers
        with self._log.lock:
            read = None
            try:
                with one_cut(), profiler_range("delta_tracker: read"):
                    try:
                        self._model.check_attached()
                        self.check(top_k, with_optimizer=with_optimizer)
                        read = consumers.read(consumer, with_states=with_states or top_k is not None)
                    except Exception as error:
                        if isinstance(top_k, TopK):
                            self._choose(error, top_k, ranks)  # report the error to the ranks that wait for this one
                        raise
                    chosen = {} if top_k is None else split_by_mask(self._choose(read.rows, top_k, ranks))
                    rows, left_out = {}, {}
                    for fqn, changed in read.rows.items():
                        sent = changed if with_states or changed.states is None else changed.without_states()
                        if fqn in chosen:
                            first, others = chosen[fqn]
                            sent, left_out[fqn] = sent.take(first), changed.take(others)
                        rows[fqn] = self._rows(
                            fqn, sent, with_states=with_states, with_values=with_values, with_optimizer=with_optimizer
                        )
                    found = result(read.returns(rows, left_out))
                if commit:
                    consumers.commit(read)
                else:
                    consumers.hold(read)
                return found  # noqa: TRY300  an interrupt before it must not lose the rows
            except BaseException:
                if read is not None:
                    consumers.abort(read)
                raise

    def check(self, top_k: TopK | None, *, with_optimizer: bool) -> None:
        """Check that the tracked model and the tracking mode support these arguments of a read.

        Raises UnsupportedModelError if ``with_optimizer`` is True and the optimizer of a table is not fused. Raises
        InvalidArgumentError if ``top_k`` is not a TopK, or if it has no ``score`` and the mode has no default score.
        """
        if top_k is not None and not isinstance(top_k, TopK):
            raise InvalidArgumentError("top_k", top_k, "Pass a TopK, for example TopK(rows=1000)")
        for fqn, shard in self._model.shards.items():
            if with_optimizer and not shard.is_fused:
                parts, problem = {fqn: "its optimizer is not fused"}, "a table without optimizer states to read"
                remedy = "Pass with_optimizer=False, or build the tracker with the table in fqns_to_skip"
                raise UnsupportedModelError(parts, remedy, problem=problem)
        if top_k is not None and top_k.score is None and not self._capture.has_scores:
            raise InvalidArgumentError("top_k", top_k, "Track in EMBEDDING or a momentum mode, or give TopK a score")

    def _rows(
        self, fqn: str, changed: ChangedRows, *, with_states: bool, with_values: bool, with_optimizer: bool
    ) -> DeltaRows:
        shard = self._model.shards[fqn]
        owned = admitted = evicted = None
        if changed.former is not None:  # the table has managed collisions
            owned = self._owners(fqn, changed)
            is_same = changed.former == owned
            admitted, evicted = owned.masked_fill(is_same, NO_OWNER), changed.former.masked_fill(is_same, NO_OWNER)
        return DeltaRows(
            changed.ids,
            self._capture.states(shard, changed) if with_states else None,
            read_rows(shard, changed.ids) if with_values else None,
            shard=shard.spec,
            known=changed.known,
            optimizer=read_optimizer(shard, changed.ids) if with_optimizer else (),
            raw_ids=owned,
            admitted=admitted,
            evicted=evicted,
        )

    def _owners(self, fqn: str, changed: ChangedRows) -> Tensor:
        """Return the raw id of each changed row at the last cut, ``[N]`` int64, for a table with managed collisions."""
        return self._log.segments.owners[fqn].owners.index_select(0, changed.ids)

    def _choose(
        self, rows: Mapping[str, ChangedRows] | Exception, top_k: TopK, ranks: AllRanks | None
    ) -> dict[str, Tensor]:
        """Select rows by top-k. Return a mask for each table, by FQN: ``[N]`` bool, True for the rows to return.

        All ranks must call this method. On ranks other than 0, replicated tables have no mask, and all of their changed
        rows are returned. In 2D parallelism, the same applies to all tables on replicas other than the first. If
        ``rows`` is the error of this rank's read, it is reported to the other ranks and raised.
        """
        if ranks is None:
            ranks = self._ranks = self._ranks or AllRanks()
        candidates: dict[str, Candidates] | Exception
        if isinstance(rows, Exception):
            candidates = rows
        else:
            specs = {fqn: self._model.shards[fqn].spec for fqn in rows}
            local = [
                fqn for fqn, spec in specs.items() if spec.replica == 0 and (ranks.rank == 0 or not spec.is_replicated)
            ]
            try:
                candidates = {fqn: self._candidates(fqn, rows[fqn], top_k) for fqn in local}
            except Exception as error:  # noqa: BLE001  choose() reports it to the waiting ranks, then raises it
                candidates = error
        try:
            return choose(top_k, candidates, list(self._model.shards), ranks)
        except BaseException as error:
            if not isinstance(error, Exception) and not ranks.is_expected:  # else, the caller takes part later
                ranks.leave()
            raise

    def _candidates(self, fqn: str, changed: ChangedRows, top_k: TopK) -> Candidates:
        spec = self._model.shards[fqn].spec
        if top_k.score is not None:
            # Pass a copy, because the score may write to it.
            rows = self._rows(fqn, changed.copy(), with_states=True, with_values=True, with_optimizer=False)
            scores = self._checked_scores(fqn, top_k.score(fqn, rows), changed)
        else:
            scores = self._scores(self._model.shards[fqn], changed)
        is_due = torch.zeros_like(changed.ids, dtype=torch.bool)
        if top_k.max_age is not None and changed.ages is not None:
            is_due = changed.ages >= top_k.max_age
        if changed.former is not None:  # without its new raw id, the consumer would use the row for the former one
            is_due |= changed.former != self._owners(fqn, changed)
        return Candidates(scores, is_due, spec.num_columns * spec.table.dtype.itemsize + _ID_BYTES)

    def _scores(self, shard: LocalShard, changed: ChangedRows) -> Tensor:
        """Return the mode's score of each row, ``[N]`` float32. Infinity replaces NaN. Reads the rows in chunks."""
        states = self._capture.states(shard, changed)
        assert states is not None, "every mode with scores has states"
        scores = torch.empty(len(changed), dtype=torch.float32, device=changed.ids.device)
        for chunk, values in row_chunks(shard, changed.ids, _CHUNK_ROWS):
            scores[chunk] = self._capture.scores(values, states[chunk])
        # A score is NaN if the row's old state is unknown or the row has diverged. Such rows are returned first.
        return torch.where(scores.isnan(), torch.inf, scores)

    def _checked_scores(self, fqn: str, scores: Tensor, rows: ChangedRows) -> Tensor:
        """Check a score function's result. Return it as ``[N]`` float32, with infinity for unknown old states."""
        if scores.shape == (len(rows),) and rows.known is not None:
            scores = torch.where(rows.known, scores, torch.inf)
        if scores.shape != (len(rows),) or bool(scores.isnan().any()):
            remedy = f"Return [{len(rows)}] numbers without NaN"
            raise InvalidArgumentError(f"score of {fqn!r}", tuple(scores.shape), remedy)
        return scores.detach().to(torch.float32, copy=True)  # the score function may reuse its output tensor
