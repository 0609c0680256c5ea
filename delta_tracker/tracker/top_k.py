"""Top-k: which of the changed rows a delta carries when there is room for some of them only.

All ranks agree on one threshold per budget by a radix search over the scores' bits: three histograms and one exchange
of ties, four collectives of a fixed size, whatever the number of rows. No row and no score leaves its rank.

Letters: ``G`` budgets, ``N`` rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from delta_tracker.distributed import TORCH_TIMEOUT, RankGroup
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.types import DeltaRows

Score = Callable[[str, DeltaRows], Tensor]

_DIGITS = (21, 10, 0)  # shifts: 11, 11 and 10 bits of a 32-bit key
_NUM_BINS = 1 << 11
_KEY_BITS = 32
_HEADER = 3  # columns
_FAILED = 2  # its column that is above 0 if a rank failed


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """How much a delta may carry, and by what the rows are chosen. Exactly one budget is given.

    The rows that changed most go first; of equal ones that of the lower rank, then of the earlier table, then of the
    lower id. Before all others go rows whose old state is unknown. Rows that are left out stay pending with their old
    state, so that their score grows until they are sent. A row of a column-wise table counts once for each rank that
    holds a part of it.

    Args:
        rows: how many rows.
        fraction: which part of the changed rows, above 0 and up to 1, rounded up.
        num_bytes: how many bytes of values and ids, 8 bytes an id.
        per_table: the budget holds for each table over all ranks; otherwise for all tables and all ranks together.
        max_age: a row that this many committed reads have left out goes with the next, even above the budget.
        score: gives how far each row of a table moved, ``[N]``, higher is more, from its FQN and its
            :class:`~delta_tracker.types.DeltaRows` with values, which are copies that it may write to. By
            default the mode says it: L2 norm of (current - old) in EMBEDDING, the momentum or its growth in the
            momentum modes.

    Raises:
        InvalidArgumentError: for no budget or several, or one out of its range.

    Example:
        >>> TopK(rows=1000, max_age=5).rows
        1000
    """

    rows: int | None = None
    fraction: float | None = None
    num_bytes: int | None = None
    per_table: bool = False
    max_age: int | None = None
    score: Score | None = None

    def __post_init__(self) -> None:
        budgets = {name: getattr(self, name) for name in ("rows", "fraction", "num_bytes")}
        given = {name: budget for name, budget in budgets.items() if budget is not None}
        if len(given) != 1:
            raise InvalidArgumentError("TopK", budgets, "Give exactly one of rows, fraction and num_bytes")
        ((name, budget),) = given.items()
        if not budget > 0 or (budget > 1 if name == "fraction" else type(budget) is not int):
            raise InvalidArgumentError(name, budget, "Give a whole number above 0, or a fraction up to 1")
        if self.max_age is not None and self.max_age < 1:
            raise InvalidArgumentError("max_age", self.max_age, "Give 1 or more reads")


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The changed rows of one table, to choose from.

    Args:
        scores: ``[N]`` float32, ``inf`` for what goes before all others.
        is_due: ``[N]`` bool, rows that go in any case.
        row_bytes: what a row costs of a budget in bytes.
    """

    scores: Tensor
    is_due: Tensor
    row_bytes: int


class Agreement(Protocol):
    """All ranks that share a budget. Every rank calls the same methods in the same order."""

    def total(self, counts: Tensor) -> Tensor:
        """The sum of int64 ``counts`` over all ranks."""

    def before(self, counts: Tensor) -> Tensor:
        """The sum of int64 ``counts`` over all lower ranks."""


class AllRanks:
    """All ranks of a group, which share a budget.

    Args:
        group: the ranks; None to join a group of all ranks of the default process group. A collective then.

    Raises:
        RankLostError: if a rank dies or does not come in time.
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        self._group = RankGroup("top-k", "get_delta(top_k=...)", TORCH_TIMEOUT) if group is None else group
        self.rank = self._group.rank

    def total(self, counts: Tensor) -> Tensor:
        """The sum over all ranks."""
        self._group.add(counts)
        return counts

    def leave(self) -> None:
        """Let every later call raise, because this rank has left a choice before its end. No collective."""
        self._group.leave("this one was interrupted while rows were chosen")

    def before(self, counts: Tensor) -> Tensor:
        """The sum over all lower ranks."""
        every = self._group.all_gather(counts)
        return torch.stack([torch.zeros_like(counts), *every]).cumsum(0)[self.rank]


def choose(
    top_k: TopK, tables: Mapping[str, Candidates] | Exception, fqns: Sequence[str], ranks: Agreement
) -> dict[str, Tensor]:
    """Choose the rows that go. A collective: every rank calls it with the same budget and tables.

    Args:
        top_k: the budget.
        tables: FQN to candidates, for some or all of ``fqns``; or what kept this rank from naming them, which every
            rank must learn of.
        fqns: all tables, in the same order on every rank.
        ranks: who shares the budget.

    Returns:
        FQN to ``[N]`` bool, for the tables given.

    Raises:
        InvalidArgumentError: if another rank could not name its candidates.
        RankLostError: if a rank died or did not answer in time.
        Exception: ``tables``, if it is one.
    """
    groups = [[fqn] for fqn in fqns] if top_k.per_table else [list(fqns)]
    rounds = _Rounds(ranks, len(groups))
    if isinstance(tables, Exception):
        rounds.finish()
        raise tables
    try:
        search = _Search(top_k, [[tables[fqn] for fqn in group if fqn in tables] for group in groups])
        masks = _masks(search, rounds)
    except Exception:
        rounds.finish()
        raise
    if masks is None:
        raise InvalidArgumentError(
            "top_k", "score", "Another rank could not read or score its rows: see the error there"
        )
    return dict(zip([fqn for fqn in fqns if fqn in tables], masks, strict=True))


def _masks(search: _Search, rounds: _Rounds) -> list[Tensor] | None:
    """Return the masks of this rank's tables; None if another rank has failed."""
    agreed = rounds.next(torch.cat([search.header(), search.histograms(_DIGITS[0])], dim=1))
    if bool(agreed[:, _FAILED].any()):
        return None
    search.set_budgets(agreed[:, 0], agreed[:, 1])
    search.narrow(_DIGITS[0], agreed[:, _HEADER:])
    for shift in _DIGITS[1:]:
        search.narrow(shift, rounds.next(search.histograms(shift)))
    return search.masks(rounds.next(search.ties()))


class _Rounds:
    """The collectives of one choice, in their order. All ranks take part in all of them, also one that has failed.

    Args:
        ranks: who share the budget.
        num_groups: how many budgets.
    """

    def __init__(self, ranks: Agreement, num_groups: int) -> None:
        first = torch.zeros(num_groups, _HEADER + _NUM_BINS, dtype=torch.int64)
        first[:, _FAILED] = 1
        self._left = [
            (ranks.total, first),
            *[(ranks.total, torch.zeros(num_groups, _NUM_BINS, dtype=torch.int64)) for _ in _DIGITS[1:]],
            (ranks.before, torch.zeros(num_groups, dtype=torch.int64)),
        ]

    def next(self, counts: Tensor) -> Tensor:
        """Return what the counts of all ranks come to in the next collective."""
        collective, _ = self._left.pop(0)
        return collective(counts)

    def finish(self) -> None:
        """Take part in the collectives that are left, without rows. The first one makes the others unnecessary."""
        has_begun = len(self._left) <= len(_DIGITS)
        for collective, nothing in self._left if has_begun else self._left[:1]:
            collective(nothing)


class _Search:
    """A radix search for each budget's threshold, over the keys of this rank's rows.

    ``remaining`` is what is left of each budget after the keys above ``prefix``, whose digits are found so far;
    ``under`` are the keys that begin with them and are not due, fewer with each digit.
    """

    def __init__(self, top_k: TopK, groups: list[list[Candidates]]) -> None:
        self._top_k = top_k
        self._groups = groups
        self._keys = [[_ordered_keys(table.scores) for table in group] for group in groups]
        self._under = [
            [key[~table.is_due] if bool(table.is_due.any()) else key for table, key in pairs] for pairs in self._pairs()
        ]
        self._prefix = torch.zeros(len(groups), dtype=torch.int64)
        self._remaining = torch.zeros(len(groups), dtype=torch.int64)
        self._takes_all = torch.zeros(len(groups), dtype=torch.bool)

    def header(self) -> Tensor:
        """``[G, 3]``: changed rows, cost of those that are due, and 0, because this rank has not failed."""
        return torch.tensor(
            [
                [
                    sum(len(table.scores) for table in group),
                    sum(int(table.is_due.sum()) * self._cost(table) for table in group),
                    0,
                ]
                for group in self._groups
            ],
            dtype=torch.int64,
        ).reshape(-1, 3)

    def histograms(self, shift: int) -> Tensor:
        """``[G, bins]`` cost of the rows under the prefix, by the digit at ``shift``."""
        rows = [torch.zeros(_NUM_BINS, dtype=torch.int64) for _ in self._groups]
        for index, group in enumerate(self._groups):
            for number, table in enumerate(group):
                digits = (self._narrowed(index, number, shift) >> shift) & (_bins(shift) - 1)
                rows[index] += torch.bincount(digits.cpu(), minlength=_NUM_BINS) * self._cost(table)
        return torch.stack(rows)

    def set_budgets(self, num_rows: Tensor, due_cost: Tensor) -> None:
        """What there is to spend beside the rows that are due."""
        top_k = self._top_k
        if top_k.fraction is not None:
            budgets = (num_rows.double() * top_k.fraction).ceil().long()
        else:
            budgets = torch.full_like(num_rows, top_k.rows or top_k.num_bytes or 0)
        self._remaining = (budgets - due_cost).clamp(min=0)

    def narrow(self, shift: int, histograms: Tensor) -> None:
        """Find the digit at ``shift`` in which the budget runs out."""
        for index, histogram in enumerate(histograms):
            if self._takes_all[index]:
                continue
            from_top = histogram.flip(0).cumsum(0)
            num_fitting = int((from_top <= self._remaining[index]).sum())
            if num_fitting == _NUM_BINS:
                self._takes_all[index] = True
                continue
            if num_fitting:
                self._remaining[index] -= from_top[num_fitting - 1]
            self._prefix[index] |= (_NUM_BINS - 1 - num_fitting) << shift

    def ties(self) -> Tensor:
        """``[G]`` cost of this rank's rows at the threshold."""
        costs = [
            0
            if bool(self._takes_all[index])
            else sum(
                int((self._under[index][number] == self._prefix[index].item()).sum()) * self._cost(table)
                for number, table in enumerate(group)
            )
            for index, group in enumerate(self._groups)
        ]
        return torch.tensor(costs, dtype=torch.int64)

    def masks(self, spent_before: Tensor) -> list[Tensor]:
        """``[N]`` bool for each table, in the groups' order: due, above the threshold, or a tie that still fits."""
        masks = []
        for index, pairs in enumerate(self._pairs()):
            left = int(self._remaining[index] - spent_before[index])
            for table, key in pairs:
                threshold = self._prefix[index].item()
                chosen = table.is_due | (key > threshold)
                if bool(self._takes_all[index]):
                    chosen = torch.ones_like(table.is_due)
                else:
                    tied = (~table.is_due & (key == threshold)).nonzero().flatten()
                    fitting = tied[: max(0, left // self._cost(table))]
                    chosen[fitting] = True
                    left -= len(tied) * self._cost(table)
                masks.append(chosen)
        return masks

    def _pairs(self) -> list[list[tuple[Candidates, Tensor]]]:
        return [list(zip(group, keys, strict=True)) for group, keys in zip(self._groups, self._keys, strict=True)]

    def _cost(self, table: Candidates) -> int:
        return table.row_bytes if self._top_k.num_bytes is not None else 1

    def _narrowed(self, index: int, number: int, shift: int) -> Tensor:
        """The keys of a table under the digits above ``shift``; the others are not asked for again."""
        keys = self._under[index][number]
        bits = shift + _bins(shift).bit_length() - 1
        if bits < _KEY_BITS:
            keys = keys[(keys >> bits) == (self._prefix[index] >> bits).item()]
            self._under[index][number] = keys
        return keys


def _bins(shift: int) -> int:
    """Bins of the digit at ``shift``: the lowest one has ten bits."""
    return _NUM_BINS if shift else 1 << _DIGITS[1]


def _ordered_keys(scores: Tensor) -> Tensor:
    """``[N]`` int64 in [0, 2**32), ordered as the float32 scores are.

    As integers, the bits of positive floats are ordered as they are, those of negative ones the other way round.
    """
    bits = (scores.float() + 0.0).view(torch.int32).long()  # + 0.0 makes the two zeros one
    if not bool((bits < 0).any()):
        return bits.add_(1 << 31)
    return torch.where(bits >= 0, bits, -(1 << 31) - bits) + (1 << 31)
