"""The compiled loops of :mod:`delta_tracker.tracker.row_sets.numba`, the one module that imports numba.

Importing it compiles the loops, or reads them from numba's cache: a matter of seconds the first time.

Shapes: ``words`` is ``[2 * B]`` int64, a bit per row, ``B`` blocks of 128 rows; ``octets`` is the same memory as
``[16 * B]`` uint8, lowest rows first, so the machine has to be little-endian; ``summary`` is ``[ceil(B / 64)]`` int64,
a bit per block that has a marked row. Nearly all is int64, because numba makes floats of int64 with uint64. No loop
holds the GIL. None passes an array to another function of this module: numba counts references at every such call,
which takes longer than the work on one id.
"""

from __future__ import annotations

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

_AHEAD = 32  # ids between a prefetch and its use: halves the time on large shards, and 24 to 48 do equally well
SPARE = 4  # numbers that :func:`unpack` may write behind the last
_FIRST_OF_FOUR = 0x1111111111111111  # a cache line holds four blocks


@intrinsic
def _popcount(_typing: Typing, _word: types.Type) -> _Intrinsic:
    """Bits set in an int64."""
    return types.int64(types.int64), lambda _context, builder, _signature, args: builder.ctpop(args[0])


@intrinsic
def _lowest(_typing: Typing, _word: types.Type) -> _Intrinsic:
    """Position of the lowest bit set in an int64; 64 if there is none."""
    undefined_for_0 = ir.Constant(ir.IntType(1), 0)
    return types.int64(types.int64), lambda _context, builder, _signature, args: builder.cttz(args[0], undefined_for_0)


@intrinsic
def _prefetch(_typing: Typing, words: types.Type, _at: types.Type) -> _Intrinsic:
    """Ask for the cache line of ``words[at]``, which will be needed soon."""

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
    """Compile a function for one signature, cached on disk where a folder for it can be written."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(signature, nogil=True, cache=True)(function)
        except (RuntimeError, OSError):
            return njit(signature, nogil=True)(function)

    return compiled


@_loop()
def _within(row: int, num_rows: int) -> np.uint64:
    """The row, or 0 if there is none such; unsigned, because numba looks whether a signed index counts from the end."""
    unsigned = np.uint64(row)  # a negative one is larger than any row
    return unsigned if unsigned < np.uint64(num_rows) else np.uint64(0)


@_loop()
def _octet(row: np.uint64) -> np.uint64:
    return row >> np.uint64(3)


@_loop()
def _place(row: np.uint64) -> int:
    """The place of a row's bit in its octet."""
    return int(row & np.uint64(7))


@_loop("int64(uint8[::1], int64[::1], int64, int64[::1])")
def mark(octets: _Octets, summary: _Ints, num_rows: int, ids: _Ints) -> int:
    """Set the bit of each id; return how many were clear."""
    count = 0
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            _prefetch(octets, int(_octet(_within(ids[i + _AHEAD], num_rows))))
        row = _within(ids[i], num_rows)
        octet = int(octets[_octet(row)])
        count += 1 - (octet >> _place(row) & 1)
        octets[_octet(row)] = octet | 1 << _place(row)
        block = int(row >> np.uint64(7))
        summary[block >> 6] |= 1 << (block & 63)
    return count


@_loop("void(uint8[::1], int64, int64[::1])")
def mark_octets(octets: _Octets, num_rows: int, ids: _Ints) -> None:
    """Set the bit of each id, in a set that fits into a cache; :func:`summarize` has to follow."""
    for i in range(ids.size):
        row = _within(ids[i], num_rows)
        octets[_octet(row)] |= 1 << _place(row)


@_loop("int64(int64[::1], int64[::1])")
def summarize(words: _Ints, summary: _Ints) -> int:
    """Write the summary of the words; return how many bits are set."""
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
    """Clear every bit."""
    for i in range(summary.size):
        blocks = summary[i]
        summary[i] = 0
        while blocks:
            first = (i << 7) + (_lowest(blocks) << 1)
            blocks &= blocks - 1
            words[first] = words[first + 1] = 0


@_loop("int64(uint8[::1], int64[::1], int64, int64[::1], int64[::1])")
def mark_new(octets: _Octets, summary: _Ints, num_rows: int, ids: _Ints, fresh: _Ints) -> int:
    """Set the bit of each id; write the ids whose bit was clear to ``fresh``, ``[N]``, and return their number."""
    count = 0
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            _prefetch(octets, int(_octet(_within(ids[i + _AHEAD], num_rows))))
        row = _within(ids[i], num_rows)
        octet = int(octets[_octet(row)])
        fresh[count] = int(row)  # no branch: it could not be foretold
        count += 1 - (octet >> _place(row) & 1)
        octets[_octet(row)] = octet | 1 << _place(row)
        block = int(row >> np.uint64(7))
        summary[block >> 6] |= 1 << (block & 63)
    return count


@_loop("void(int64[::1], int64, int64[::1], bool_[::1])")
def contains(words: _Ints, num_rows: int, ids: _Ints, found: NDArray[np.bool_]) -> None:
    """Write the bit of each id to ``found``, ``[N]``."""
    for i in range(ids.size):
        row = int(_within(ids[i], num_rows))
        found[i] = words[row >> 6] >> (row & 63) & 1 != 0


@_loop("int64(int64[::1], int64[::1], int64[::1], int64[::1])")
def absorb(words: _Ints, summary: _Ints, other: _Ints, other_summary: _Ints) -> int:
    """Add another set's bits; return how many were clear."""
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
    """Write the position of each bit that is set to ``out``, which has room for :data:`SPARE` more than there are."""
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
                out[at] = (j << 6) + _lowest(word)  # no branch: in a sparse set one of the two words is empty
                at += word != 0
                word &= word - 1
                following = at
                at += _popcount(word)
                while word:  # four at once, some of them one place too many: the end of a loop cannot be foretold
                    for k in range(following, following + 4):
                        out[k] = (j << 6) + _lowest(word)
                        word &= word - 1
                    following += 4


@_loop("void(int64[::1], int64[::1], int64[::1])")
def count_before(words: _Ints, summary: _Ints, before: _Ints) -> None:
    """Write to ``before``, ``[ceil(R / 512)]``, how many rows are marked in all spans of 512 rows before each."""
    rows = 0
    for span in range(before.size):
        before[span] = rows
        if summary[span >> 4] >> ((span & 15) << 2) & 15:
            for i in range(span << 3, min((span + 1) << 3, words.size)):
                rows += _popcount(words[i])


@_loop("void(int64[::1], int64[::1], int64, int64[::1], int64[::1])")
def rank(words: _Ints, before: _Ints, num_rows: int, ids: _Ints, out: _Ints) -> None:
    """Write to ``out``, ``[N]``, how many rows below each id are marked, given what :func:`count_before` wrote."""
    for i in range(ids.size):
        row = int(_within(ids[i], num_rows))
        last = row >> 6
        rows = before[row >> 9] + _popcount(words[last] & ((1 << (row & 63)) - 1))
        for j in range(row >> 9 << 3, last):
            rows += _popcount(words[j])
        out[i] = rows
