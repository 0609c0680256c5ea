"""Triton kernels of :mod:`delta_tracker.tracker.row_sets.triton`. No other module imports triton.

Notation: ``R`` is the number of rows of the shard, ``N`` the number of ids, ``B`` the number of blocks of 512 rows. Ids
outside ``[0, R)`` count as row 0. Shapes:

- ``words`` is ``[16 * B]`` int32, with one bit per row. The bit is set if the row is marked.
- ``summary`` is ``[ceil(B / 32)]`` int32, with one bit per block. The bit is set if a row of the block is marked.
- ``ids`` is ``[N]`` int64. Rows and positions are int64 too.

Each kernel runs many program instances in parallel on different parts of the data. Kernels are not specialized for
sizes or for the alignment of ids: each is compiled once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _within(ids: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    return tl.where((ids >= 0) & (ids < num_rows), ids, 0)


@triton.jit
def _bit(position: tl.tensor) -> tl.tensor:
    """Return, for each position, the int32 in which only bit ``position % 32`` is set."""
    return (1 << (position & 31)).to(tl.int32)


@triton.jit
def _popcount(words: tl.tensor) -> tl.tensor:
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def mark(
    sets: tl.tensor,
    ids: tl.tensor,
    fresh: tl.tensor,
    num_fresh: tl.tensor,
    size: tl.constexpr,
    wants_fresh: tl.constexpr,
) -> None:
    """Mark rows in each of ``T`` sets and update the summaries.

    ``sets`` is ``[T, 5]`` int64: for each set, the addresses of its words and summary, its number of rows, and the
    start and end of its ids in ``ids``. If ``wants_fresh`` is True, the newly marked rows of each set are written to
    ``fresh``, ``[N]``, at the start of the set's range, without duplicates. Their number is added to the set's element
    of ``num_fresh``, ``[T]`` int64. Instance ``(i, t)`` processes ``size`` ids of set ``t``, starting at ``i * size``.
    The order of the instances is random.
    """
    which = tl.program_id(1)
    own = sets + which * 5
    begin, end = tl.load(own + 3), tl.load(own + 4)
    start = begin + tl.program_id(0).to(tl.int64) * size
    if start < end:
        words = tl.load(own).to(tl.pointer_type(tl.int32))
        summary = tl.load(own + 1).to(tl.pointer_type(tl.int32))
        at = start + tl.arange(0, size)
        here = at < end
        row = _within(tl.load(ids + at, mask=here, other=0), tl.load(own + 2))
        bit = _bit(row)
        clear = here & ((tl.load(words + (row >> 5), mask=here, other=0) & bit) == 0)
        before = tl.atomic_or(words + (row >> 5), bit, mask=clear, sem="relaxed")
        block = row >> 9
        unseen = clear & ((tl.load(summary + (block >> 5), mask=clear, other=0) & _bit(block)) == 0)
        tl.atomic_or(summary + (block >> 5), _bit(block), mask=unseen, sem="relaxed")
        if wants_fresh:
            is_fresh = clear & ((before & bit) == 0)
            place = tl.cumsum(is_fresh.to(tl.int32), axis=0)
            first = tl.atomic_add(num_fresh + which, tl.sum(is_fresh.to(tl.int64), axis=0), sem="relaxed")
            tl.store(fresh + begin + first + place - 1, row, mask=is_fresh)


@triton.jit(do_not_specialize=["num_blocks"])
def count(
    words: tl.tensor,
    summary: tl.tensor,
    num_blocks: tl.int64,
    counts: tl.tensor,
    touched: tl.tensor,
    num_touched: tl.tensor,
    size: tl.constexpr,
) -> None:
    """Write the number of marked rows in each block to ``counts``, ``[B]`` int32.

    Also write the indices of the blocks with marked rows to ``touched``, ``[B]`` int32, in random order, and add the
    number of these blocks to ``num_touched``, ``[1]`` int64. Each instance processes ``size`` blocks. It reads only the
    words of blocks with marked rows.
    """
    block = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    here = block < num_blocks
    is_touched = here & ((tl.load(summary + (block >> 5), mask=here, other=0) & _bit(block)) != 0)
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    marked = _popcount(tl.load(words + at, mask=is_touched[:, None], other=0))
    tl.store(counts + block, tl.sum(marked, axis=1), mask=here)
    place = tl.cumsum(is_touched.to(tl.int32), axis=0)
    first = tl.atomic_add(num_touched, tl.sum(is_touched.to(tl.int64), axis=0), sem="relaxed")
    tl.store(touched + first + place - 1, block.to(tl.int32), mask=is_touched)


@triton.jit
def scan(words: tl.tensor, before: tl.tensor, touched: tl.tensor, out: tl.tensor) -> None:
    """Write the marked rows of one block, in ascending order, to ``out[before[block]:]``.

    ``before``, ``[B]`` int64, contains the number of marked rows in all blocks before each block. Instance ``i``
    processes the block ``touched[i]``.
    """
    block = tl.load(touched + tl.program_id(0)).to(tl.int64)
    row = block * 512 + tl.arange(0, 512)
    marked = (tl.load(words + (row >> 5)) >> (row & 31).to(tl.int32)) & 1
    position = tl.load(before + block) + tl.cumsum(marked, axis=0) - 1
    tl.store(out + position, row, mask=marked != 0)
