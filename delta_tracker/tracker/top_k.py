"""Top-k: limit the size of a delta by selecting the changed rows that have the highest scores.

All ranks find the same threshold for each budget by a radix search over the bits of the scores. The search needs four
collectives: three for the histograms of the three digits, and one for the ties (rows whose score equals the threshold).
The size of the collectives does not depend on the number of rows. Ranks exchange no rows or scores.

Notation: ``G`` is the number of budgets (1, or one per table), ``N`` the number of changed rows of a table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from delta_tracker.arguments import check_count, check_switch, is_number, refuses_unknown
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.tracker.rank_group import TORCH_TIMEOUT, RankGroup
from delta_tracker.types import DeltaRows

Score = Callable[[str, DeltaRows], Tensor]

_DIGITS = (21, 10, 0)  # right shifts of the three digits of a 32-bit key, which have 11, 11 and 10 bits
_NUM_BINS = 1 << 11
_KEY_BITS = 32
_HEADER = 3  # number of columns of the header, see _Search.header()
_FAILED = 2  # index of the header's column that is above 0 if a rank failed


@refuses_unknown()
@dataclass(frozen=True, slots=True)
class TopK:
    """Size limit of a delta (the budget), and the score that ranks the changed rows.

    Pass exactly one of the budgets ``rows``, ``fraction`` and ``num_bytes``.

    Rows are selected in descending order of score. Ties are ordered by rank, then by table, then by id. Rows whose old
    state is unknown are selected first. A row of a table with managed collisions is always selected if its raw id
    changed, even if the delta then exceeds the budget. Rows that are not selected stay pending with their old states.
    The score of a pending row covers all changes since the old state. A row of a column-wise sharded table counts once
    for each rank that stores a part of the row.

    Args:
        rows: maximum number of rows. May be passed as a positional argument.
        fraction: maximum fraction of the changed rows, above 0 and at most 1. The number of rows is rounded up.
        num_bytes: maximum size of the values and ids in bytes. An id takes 8 bytes.
        per_table: True for one budget per table, False for one budget for all tables. All ranks share each budget.
        max_age: maximum number of consecutive committed reads that may leave a row out. The next read selects the row
            even if the delta then exceeds the budget. None for no limit.
        score: function that takes a table's FQN and :class:`~delta_tracker.types.DeltaRows` with values, and returns
            ``[N]`` scores. Rows with higher scores are selected first. The function may overwrite the rows: they are
            copies. The default score is the L2 norm of (current - old) in EMBEDDING mode, and the row's value in
            ``states`` in the momentum modes. Mode ID_ONLY has no default score.

    Raises:
        InvalidArgumentError: if the number of budgets is not one, or if an argument is out of range.

    Example:
        >>> TopK(1000, max_age=5).rows
        1000
    """

    rows: int | None = None
    _: KW_ONLY
    fraction: float | None = None
    num_bytes: int | None = None
    per_table: bool = False
    max_age: int | None = None
    score: Score | None = None

    def __post_init__(self) -> None:
        budgets = {name: getattr(self, name) for name in ("rows", "fraction", "num_bytes")}
        given = {name: budget for name, budget in budgets.items() if budget is not None}
        if len(given) != 1:
            raise InvalidArgumentError("TopK", budgets, "Pass exactly one of rows, fraction and num_bytes")
        ((name, budget),) = given.items()
        is_valid = is_number(budget) and budget > 0 and (budget <= 1 if name == "fraction" else type(budget) is int)
        if not is_valid:
            remedy = "Pass a fraction above 0 and up to 1" if name == "fraction" else "Pass a whole number above 0"
            if name == "rows" and is_number(budget) and 0 < budget < 1:
                remedy = f"Pass a whole number above 0, or TopK(fraction={budget!r})"
            raise InvalidArgumentError(name, budget, remedy)
        check_switch("per_table", self.per_table)
        if self.max_age is not None:
            check_count("max_age", self.max_age)
        if self.score is not None and not callable(self.score):
            raise InvalidArgumentError("score", self.score, "Pass a function of a table's FQN and its DeltaRows")


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Input of :func:`choose` for the ``N`` changed rows of one table.

    Args:
        scores: ``[N]`` float32. ``inf`` for rows to select first.
        is_due: ``[N]`` bool. True for rows to select regardless of the budget.
        row_bytes: size of the values and id of one row in bytes. Used if the budget is ``TopK.num_bytes``.
    """

    scores: Tensor
    is_due: Tensor
    row_bytes: int


class AllRanks:
    """Collectives of the ranks that share a budget. Every rank must call the same methods in the same order.

    Args:
        group: group of these ranks. If None, a group of all ranks is created, which is a collective.

    Attributes:
        is_expected: True if other ranks have begun a selection in which this rank must participate. Callers set it, and
            :meth:`total` resets it to False.

    Raises:
        RankLostError: in the constructor and in each collective, if a rank dies or does not make the same call in time.
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        self._group = RankGroup("top-k", "get_delta(top_k=...)", TORCH_TIMEOUT) if group is None else group
        self.rank = self._group.rank
        self.is_expected = False

    def total(self, counts: Tensor) -> Tensor:
        """Replace int64 ``counts`` in place with the elementwise sum over all ranks and return it. A collective."""
        self.is_expected = False
        self._group.add(counts)
        return counts

    def leave(self) -> None:
        """Make every later collective of this object raise. Call it if this rank was interrupted. Not a collective."""
        self._group.leave("this rank was interrupted while it selected rows")

    def before(self, counts: Tensor) -> Tensor:
        """Return the elementwise sum of int64 ``counts`` over all ranks below this rank. A collective."""
        every = self._group.all_gather(counts)
        return torch.stack([torch.zeros_like(counts), *every]).cumsum(0)[self.rank]


def choose(
    top_k: TopK, tables: Mapping[str, Candidates] | Exception, fqns: Sequence[str], ranks: AllRanks
) -> dict[str, Tensor]:
    """Select the rows of a delta. A collective: every rank must call it with the same ``top_k`` and ``fqns``.

    Args:
        top_k: budget and score.
        tables: candidates by table FQN, for some or all of ``fqns``. If an error prevented this rank from computing
            the candidates, pass the error instead. All ranks then raise an error.
        fqns: FQNs of all tables, in the same order on every rank.
        ranks: ranks that share the budget.

    Returns:
        Mask for each FQN in ``tables``: ``[N]`` bool, True for selected rows.

    Raises:
        InvalidArgumentError: if another rank reported an error.
        Exception: ``tables`` itself, if it is an exception.
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
            "top_k", "score", "Fix the error of the rank that failed before it selected its rows"
        )
    return dict(zip([fqn for fqn in fqns if fqn in tables], masks, strict=True))


def _masks(search: "_Search", rounds: "_Rounds") -> list[Tensor] | None:
    """Run the search and return a mask of the selected rows for each table; None if a rank failed. A collective."""
    agreed = rounds.next(torch.cat([search.header(), search.histograms(_DIGITS[0])], dim=1))
    if bool(agreed[:, _FAILED].any()):
        return None
    search.set_budgets(agreed[:, 0], agreed[:, 1])
    search.narrow(_DIGITS[0], agreed[:, _HEADER:])
    for shift in _DIGITS[1:]:
        search.narrow(shift, rounds.next(search.histograms(shift)))
    return search.masks(rounds.next(search.ties()))


class _Rounds:
    """Sequence of the collectives that one selection needs.

    A rank that fails must call :meth:`finish`, because the other ranks wait for it in the remaining collectives.
    """

    def __init__(self, ranks: AllRanks, num_groups: int) -> None:
        first = torch.zeros(num_groups, _HEADER + _NUM_BINS, dtype=torch.int64, device="cpu")
        first[:, _FAILED] = 1
        self._left = [
            (ranks.total, first),
            *[(ranks.total, torch.zeros(num_groups, _NUM_BINS, dtype=torch.int64, device="cpu")) for _ in _DIGITS[1:]],
            (ranks.before, torch.zeros(num_groups, dtype=torch.int64, device="cpu")),
        ]

    def next(self, counts: Tensor) -> Tensor:
        """Run the next collective on int64 ``counts`` and return its result.

        The shape of ``counts`` is ``[G, _HEADER + _NUM_BINS]`` in the first collective, which adds headers and
        histograms, and ``[G, _NUM_BINS]`` in the next two, which add histograms. In the last one it is ``[G]``: the
        cost of the ties (rows whose score equals the threshold) is summed over the lower ranks.
        """
        collective, _ = self._left.pop(0)
        return collective(counts)

    def finish(self) -> None:
        """Take part in the remaining collectives without rows. The first one reports the failure to all ranks."""
        has_begun = len(self._left) <= len(_DIGITS)
        for collective, nothing in self._left if has_begun else self._left[:1]:
            collective(nothing)


class _Keys:
    """Integer keys of the scores of one table, in CPU memory. A higher score has a higher key.

    ``_under`` contains the keys of the rows that are not due and match the prefix.
    """

    def __init__(self, table: Candidates) -> None:
        self.is_due = table.is_due
        self.row_bytes = table.row_bytes
        self._keys = _ordered_keys(table.scores)
        self._prepare()

    def __len__(self) -> int:
        return len(self.is_due)

    @property
    def num_due(self) -> Tensor:
        """Number of due rows, zero-dimensional int64."""
        return self.is_due.sum()

    def _prepare(self) -> None:
        self._under = self._keys[~self.is_due] if bool(self.is_due.any()) else self._keys

    def histogram(self, prefix: int, shift: int) -> Tensor:
        """Count the rows that are not due and match ``prefix``, by the digit at ``shift``, ``[_NUM_BINS]`` int64.

        A prefix contains the digits above ``shift``; all other bits are 0. It extends the prefix of the previous call.
        """
        num_bits = shift + _bins(shift).bit_length() - 1
        if num_bits < _KEY_BITS:
            self._under = self._under[(self._under >> num_bits) == prefix >> num_bits]
        return torch.bincount((self._under >> shift) & (_bins(shift) - 1), minlength=_NUM_BINS)

    def num_ties(self, threshold: int) -> Tensor:
        """Return the number of rows that are not due and whose key is ``threshold``, zero-dimensional int64."""
        return (self._under == threshold).sum()

    def mask(self, threshold: int, num_ties: int) -> Tensor:
        """Return a mask of the selected rows, ``[N]`` bool.

        A row is selected if it is due, if its key is above ``threshold``, or if it is one of the first ``num_ties``
        ties: rows that are not due and whose key is ``threshold``.
        """
        chosen = self.is_due | (self._keys > threshold)
        tied = (~self.is_due & (self._keys == threshold)).nonzero().flatten()
        chosen[tied[:num_ties]] = True
        return chosen


class _DeviceKeys(_Keys):
    """Keys on a device. No method waits for the device. The keys and a sorted copy take 16 bytes per row."""

    def _prepare(self) -> None:
        self._keys = torch.where(self.is_due, -1, self._keys)  # keys are 0 or more
        self._ordered = self._keys.sort().values

    def histogram(self, prefix: int, shift: int) -> Tensor:
        # A search in the sorted keys needs no atomic additions, which are slow where many keys have the same digit.
        edges = torch.arange(_bins(shift) + 1, device=self._keys.device) * (1 << shift) + prefix
        counts = torch.searchsorted(self._ordered, edges).diff()
        return torch.cat([counts, counts.new_zeros(_NUM_BINS - len(counts))])

    def num_ties(self, threshold: int) -> Tensor:
        return (self._keys == threshold).sum()

    def mask(self, threshold: int, num_ties: int) -> Tensor:
        is_tied = self._keys == threshold
        return self.is_due | (self._keys > threshold) | (is_tied & (is_tied.cumsum(0) <= num_ties))


class _Search:
    """Radix search for each budget's threshold, over the integer keys of this rank's scores.

    ``_prefix`` contains the digits of each threshold that are already known. ``_remaining`` is the part of each budget
    that is left after the due rows (``is_due``) and the rows whose key is above the prefix. ``_takes_all`` is True for
    each budget into which all rows fit. ``_num_ties`` is the number of ties of each table, once it is known.

    If tables are on a device, each round waits for the device once.

    Args:
        top_k: the budget.
        groups: for each of the ``G`` budgets, the candidates of this rank's tables that share it.
    """

    def __init__(self, top_k: TopK, groups: list[list[Candidates]]) -> None:
        self._top_k = top_k
        self._groups = [
            [(_Keys if table.scores.device.type == "cpu" else _DeviceKeys)(table) for table in group]
            for group in groups
        ]
        self._num_ties: list[list[int]] = []
        self._prefix = [0] * len(groups)
        self._remaining = torch.zeros(len(groups), dtype=torch.int64, device="cpu")
        self._takes_all = [False] * len(groups)

    def header(self) -> Tensor:
        """Return the header that precedes the first histogram of each budget, ``[G, 3]`` int64.

        The columns are the number of this rank's changed rows, the cost of its due rows, and the failure flag, which is
        0 here. Costs are in the budget's unit: bytes for ``TopK.num_bytes``, otherwise rows.
        """
        num_due = self._counted(lambda _, table: table.num_due)
        return self._remaining.new_tensor(
            [
                [sum(map(len, group)), sum(int(n) * self._cost(each) for n, each in zip(due, group, strict=True)), 0]
                for due, group in zip(num_due, self._groups, strict=True)
            ]
        ).reshape(-1, 3)

    def histograms(self, shift: int) -> Tensor:
        """Return the cost of this rank's rows that match the prefix and are not due, by digit, ``[G, _NUM_BINS]``."""
        costs = torch.zeros(len(self._groups), _NUM_BINS, dtype=torch.int64, device="cpu")
        counted = self._counted(lambda index, table: table.histogram(self._prefix[index], shift))
        for index, (histograms, group) in enumerate(zip(counted, self._groups, strict=True)):
            for histogram, table in zip(histograms, group, strict=True):
                costs[index] += histogram * self._cost(table)
        return costs

    def set_budgets(self, num_rows: Tensor, due_cost: Tensor) -> None:
        """Subtract the cost of the due rows from each budget. Both arguments are ``[G]``, summed over all ranks."""
        top_k = self._top_k
        if top_k.fraction is not None:
            budgets = (num_rows.double() * top_k.fraction).ceil().long()
        else:
            budgets = torch.full_like(num_rows, top_k.rows or top_k.num_bytes or 0)
        self._remaining = (budgets - due_cost).clamp(min=0)

    def narrow(self, shift: int, histograms: Tensor) -> None:
        """Find the next digit of each threshold.

        This is the highest digit for which the cost of all rows with this or a higher digit exceeds the remaining
        budget. If there is no such digit, all rows fit. ``histograms`` is ``[G, _NUM_BINS]``, the sum over all ranks.
        """
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
        """Return the cost of this rank's ties, ``[G]`` int64; 0 for budgets into which all rows fit."""
        counted = self._counted(lambda index, table: table.num_ties(self._prefix[index]))
        self._num_ties = [[int(count) for count in counts] for counts in counted]
        costs = [
            0 if takes_all else sum(n * self._cost(table) for n, table in zip(counts, group, strict=True))
            for takes_all, counts, group in zip(self._takes_all, self._num_ties, self._groups, strict=True)
        ]
        return torch.tensor(costs, dtype=torch.int64, device="cpu")

    def masks(self, spent_before: Tensor) -> list[Tensor]:
        """Return a mask of the selected rows, ``[N]`` bool, for each table, in the order of the groups.

        A row is selected if it is due, if its key is above the threshold, or if it is a tie and fits into the remaining
        budget. ``spent_before``, ``[G]``, is the part of each budget that the ties of lower ranks take.
        """
        masks = []
        for index, group in enumerate(self._groups):
            left = int(self._remaining[index] - spent_before[index])
            for num_ties, table in zip(self._num_ties[index], group, strict=True):
                if self._takes_all[index]:
                    masks.append(torch.ones_like(table.is_due))
                else:
                    masks.append(table.mask(self._prefix[index], max(0, left // self._cost(table))))
                    left -= num_ties * self._cost(table)
        return masks

    def _cost(self, table: _Keys) -> int:
        return table.row_bytes if self._top_k.num_bytes is not None else 1

    def _counted(self, count: Callable[[int, _Keys], Tensor]) -> list[list[Tensor]]:
        """Call ``count(budget index, table)`` for all tables. Return the results on the host, by budget."""
        counts = iter(_on_host([count(index, table) for index, group in enumerate(self._groups) for table in group]))
        return [[next(counts) for _ in group] for group in self._groups]


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the same shape and dtype on the CPU. Waits once for each device except the CPU."""
    found = list(tensors)
    for device in {each.device for each in tensors if each.device.type != "cpu"}:
        places = [place for place, each in enumerate(tensors) if each.device == device]
        for place, each in zip(places, torch.stack([tensors[place] for place in places]).cpu(), strict=True):
            found[place] = each
    return found


def _bins(shift: int) -> int:
    """Return the number of histogram bins for the digit at ``shift``: 2**10 for the lowest digit, otherwise 2**11."""
    return _NUM_BINS if shift else 1 << _DIGITS[1]


def _ordered_keys(scores: Tensor) -> Tensor:
    """Return ``[N]`` int64 keys in [0, 2**32) with the same order as the float32 scores.

    As integers, the bits of positive floats keep their order, and the bits of negative floats have the reverse order.
    """
    bits = (scores.float() + 0.0).view(torch.int32).long()  # + 0.0 maps -0.0 to 0.0
    if bits.device.type == "cpu" and not bool((bits < 0).any()):  # faster; on a device, this would wait
        return bits.add_(1 << 31)
    return torch.where(bits >= 0, bits, -(1 << 31) - bits) + (1 << 31)
