"""Numba kernels of :mod:`delta_tracker.tracker.row_sets.numba`. No other module imports numba.

The first import compiles the kernels, which takes seconds. Later imports load them from numba's cache.

Notation: ``R`` is the number of rows of the shard, ``N`` the number of ids, ``B`` the number of blocks of 128 rows.
Ids outside ``[0, R)`` count as row 0. Shapes:

- ``words`` is ``[2 * B]`` int64, with one bit per row. The bit is set if the row is marked.
- ``octets`` is the same memory as ``[16 * B]`` uint8. Bit ``j`` of ``octets[i]`` belongs to row ``8 * i + j``. This
  requires a little-endian machine.
- ``summary`` is ``[ceil(B / 64)]`` int64, with one bit per block. The bit is set if a row of the block is marked.
- ``ids`` is ``[N]`` int64.

Nearly all integers are int64, because numba promotes an operation on int64 and uint64 to float. All kernels release the
GIL. No kernel passes an array to another compiled function, because numba counts references at each such call. This
takes longer than the work on one id.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing import BaseContext as Typing
from numba.core.typing import Signature
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from numpy.typing import NDArray

_Ints = NDArray[np.int64]
_Octets = NDArray[np.uint8]
_Intrinsic = tuple[Signature, Callable[[BaseContext, ir.IRBuilder, Signature, Sequence[ir.Value]], ir.Value]]

_AHEAD = 32  # ids between a prefetch and its use: halves the time on large shards; 24 to 48 are equally fast
SPARE = 4  # number of elements that the loops may write after the last row of a scan
_FIRST_OF_FOUR = 0x1111111111111111  # the lowest of every four bits, because a cache line holds four blocks


@intrinsic
def _popcount(_typing: Typing, _word: types.Type) -> _Intrinsic:
    return types.int64(types.int64), lambda _context, builder, _signature, args: builder.ctpop(args[0])


@intrinsic
def _lowest(_typing: Typing, _word: types.Type) -> _Intrinsic:
    """Return the position of the lowest bit set in an int64, or 64 if no bit is set."""
    undefined_for_0 = ir.Constant(ir.IntType(1), 0)
    return types.int64(types.int64), lambda _context, builder, _signature, args: builder.cttz(args[0], undefined_for_0)


@intrinsic
def _prefetch(_typing: Typing, words: types.Type, _at: types.Type) -> _Intrinsic:

    def generate(
        context: BaseContext, builder: ir.IRBuilder, _signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        array = make_array(words)(context, builder, args[0])
        pointer = cgutils.get_item_pointer(context, builder, words, array, [args[1]])
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", (byte,), ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        )
        for_writing, keep, data = (ir.Constant(flag, value) for value in (1, 3, 1))
        builder.call(function, [builder.bitcast(pointer, byte), for_writing, keep, data])
        return context.get_dummy_value()

    return types.void(words, types.int64), generate


def _loop(signature: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that compiles a function with numba. The compiled code is cached on disk if possible.

    ``signature`` lists types for which to compile the function immediately. If None, it is compiled at its first call.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):
            return njit(signature, nogil=True)(function)

    return compiled


@_loop()
def _within(row: int, num_rows: int) -> np.uint64:
    """Return the row, or 0 if it is out of range.

    The result is unsigned, because numba adds a check for negative values to each signed index.
    """
    unsigned = np.uint64(row)  # negative rows become larger than any row
    return unsigned if unsigned < np.uint64(num_rows) else np.uint64(0)


@_loop()
def _octet(row: np.uint64) -> np.uint64:
    return row >> np.uint64(3)


@_loop()
def _index(row: np.uint64) -> int:
    return int(row & np.uint64(7))


@_loop("int64(uint8[::1], int64[::1], int64, int64[::1])")
def mark(octets: _Octets, summary: _Ints, num_rows: int, ids: _Ints) -> int:
    """Mark the row of each id and update the summary. Return the number of newly marked rows."""
    count = 0
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            _prefetch(octets, int(_octet(_within(ids[i + _AHEAD], num_rows))))
        row = _within(ids[i], num_rows)
        octet = int(octets[_octet(row)])
        count += 1 - (octet >> _index(row) & 1)
        octets[_octet(row)] = octet | 1 << _index(row)
        block = int(row >> np.uint64(7))
        summary[block >> 6] |= 1 << (block & 63)
    return count


@_loop("void(uint8[::1], int64, int64[::1])")
def mark_octets(octets: _Octets, num_rows: int, ids: _Ints) -> None:
    """Mark the row of each id. Does not update the summary: call :func:`summarize` afterwards.

    Faster than :func:`mark` if the words fit into a core's cache.
    """
    for i in range(ids.size):
        row = _within(ids[i], num_rows)
        octets[_octet(row)] |= 1 << _index(row)


@_loop("int64(int64[::1], int64[::1])")
def summarize(words: _Ints, summary: _Ints) -> int:
    """Compute ``summary`` from ``words``. Return the number of marked rows."""
    count = 0
    for i in range(summary.size):
        blocks = 0
        for first in range(i << 7, min(i + 1 << 7, words.size), 2):
            one, two = words[first], words[first + 1]
            count += _popcount(one) + _popcount(two)
            blocks |= int((one | two) != 0) << (first >> 1 & 63)
        summary[i] = blocks
    return count


@_loop("void(int64[::1], int64[::1])")
def clear(words: _Ints, summary: _Ints) -> None:
    """Clear all bits of ``words`` and ``summary``. ``summary`` must be up to date."""
    for i in range(summary.size):
        blocks = summary[i]
        summary[i] = 0
        while blocks:
            first = (i << 7) + (_lowest(blocks) << 1)
            blocks &= blocks - 1
            words[first] = words[first + 1] = 0


@_loop("int64(uint8[::1], int64[::1], int64, int64[::1], int64[::1])")
def mark_new(octets: _Octets, summary: _Ints, num_rows: int, ids: _Ints, fresh: _Ints) -> int:
    """Mark the row of each id, update the summary, and return the number of newly marked rows.

    The newly marked rows are written to the start of ``fresh``, ``[N]`` int64.
    """
    count = 0
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            _prefetch(octets, int(_octet(_within(ids[i + _AHEAD], num_rows))))
        row = _within(ids[i], num_rows)
        octet = int(octets[_octet(row)])
        fresh[count] = int(row)  # no branch, because it would be unpredictable
        count += 1 - (octet >> _index(row) & 1)
        octets[_octet(row)] = octet | 1 << _index(row)
        block = int(row >> np.uint64(7))
        summary[block >> 6] |= 1 << (block & 63)
    return count


@_loop("void(int64[::1], int64, int64[::1], bool_[::1])")
def contains(words: _Ints, num_rows: int, ids: _Ints, found: NDArray[np.bool_]) -> None:
    """Set ``found[i]`` to True if the row of ``ids[i]`` is marked, otherwise to False. ``found`` is ``[N]`` bool."""
    for i in range(ids.size):
        row = int(_within(ids[i], num_rows))
        found[i] = words[row >> 6] >> (row & 63) & 1 != 0


@_loop("int64(int64[::1], int64[::1], int64[::1], int64[::1])")
def merge(words: _Ints, summary: _Ints, other: _Ints, other_summary: _Ints) -> int:
    """Mark all rows that are marked in another set. Return the number of newly marked rows.

    ``other`` and ``other_summary`` are the words and the summary of that set, which must have the same ``R``.
    """
    count = 0
    for i in range(summary.size):
        blocks = other_summary[i]
        summary[i] |= blocks
        while blocks:
            first = (i << 7) + (_lowest(blocks) << 1)
            blocks &= blocks - 1
            for j in range(first, first + 2):
                word = words[j] | other[j]
                count += _popcount(word ^ words[j])
                words[j] = word
    return count


@_loop("void(int64[::1], int64[::1], int64[::1])")
def unpack(words: _Ints, summary: _Ints, out: _Ints) -> None:
    """Write the marked rows to ``out`` in ascending order.

    ``out`` must have at least as many elements as there are marked rows, plus :data:`SPARE`.
    """
    at = 0
    for i in range(summary.size):
        if i + 2 < summary.size:
            blocks = summary[i + 2]
            lines = (blocks | blocks >> 1 | blocks >> 2 | blocks >> 3) & _FIRST_OF_FOUR
            while lines:
                _prefetch(words, (i + 2 << 7) + (_lowest(lines) << 1))
                lines &= lines - 1
        blocks = summary[i]
        while blocks:
            first = (i << 7) + (_lowest(blocks) << 1)
            blocks &= blocks - 1
            for j in range(first, first + 2):
                word = words[j]
                out[at] = (j << 6) + _lowest(word)  # no branch: whether a word is 0 is unpredictable
                at += word != 0
                word &= word - 1
                following = at
                at += _popcount(word)
                while word:  # writes four rows at a time, some in excess, because the number of bits is unpredictable
                    for k in range(following, following + 4):
                        out[k] = (j << 6) + _lowest(word)
                        word &= word - 1
                    following += 4


@_loop("void(int64[::1], int64[::1], int64[::1])")
def count_before(words: _Ints, summary: _Ints, before: _Ints) -> None:
    """Write the number of marked rows before each span of 512 rows to ``before``, ``[ceil(R / 512)]`` int64."""
    rows = 0
    for span in range(before.size):
        before[span] = rows
        if summary[span >> 4] >> ((span & 15) << 2) & 15:
            for i in range(span << 3, min((span + 1) << 3, words.size)):
                rows += _popcount(words[i])


@_loop("void(int64[::1], int64[::1], int64, int64[::1], int64[::1])")
def rank(words: _Ints, before: _Ints, num_rows: int, ids: _Ints, out: _Ints) -> None:
    """For each of ``ids``, write the number of marked rows with a lower id to ``out``, ``[N]`` int64.

    ``before`` is the array that :func:`count_before` filled.
    """
    for i in range(ids.size):
        row = int(_within(ids[i], num_rows))
        last = row >> 6
        rows = before[row >> 9] + _popcount(words[last] & ((1 << (row & 63)) - 1))
        for j in range(row >> 9 << 3, last):
            rows += _popcount(words[j])
        out[i] = rows
