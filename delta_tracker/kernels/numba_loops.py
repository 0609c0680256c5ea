"""The compiled loops of :mod:`delta_tracker.kernels.numba`, the one module that imports numba.

Importing it compiles the loops, or reads them from numba's cache: a matter of seconds the first time.

Shapes: ``words`` is ``[8 * B]`` int64, a bit per row, ``B`` blocks of 512 rows; ``summary`` is ``[ceil(B / 64)]``
int64, a bit per block that has a marked row; ``blocks`` lists some of the blocks. All is int64, because numba makes
floats of int64 with uint64. No loop holds the GIL. None passes an array to another function of this module: numba
counts references at every such call, which takes longer than the work on one id.
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
_Intrinsic = tuple[Signature, Callable[[BaseContext, ir.IRBuilder, Signature, Sequence[ir.Value]], ir.Value]]

_AHEAD = 32  # ids between a prefetch and its use: halves the time on large shards, and 24 to 48 do equally well


@intrinsic
def _popcount(_typing: Typing, _word: types.Type) -> _Intrinsic:
    """Bits set in an int64."""
    return types.int64(types.int64), lambda _context, builder, _signature, args: builder.ctpop(args[0])


@intrinsic
def _lowest(_typing: Typing, _word: types.Type) -> _Intrinsic:
    """Position of the lowest bit set in an int64, which is not 0."""
    undefined_for_0 = ir.Constant(ir.IntType(1), 1)
    return types.int64(types.int64), lambda _context, builder, _signature, args: builder.cttz(args[0], undefined_for_0)


@intrinsic
def _prefetch(_typing: Typing, words: types.Type, _at: types.Type) -> _Intrinsic:
    """Ask for the cache line of ``words[at]``, to be written to soon."""

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
def _within(row: int, num_rows: int) -> int:
    return row if 0 <= row < num_rows else 0


@_loop("void(int64[::1], int64[::1], int64, int64[::1])")
def mark(words: _Ints, summary: _Ints, num_rows: int, ids: _Ints) -> None:
    """Set the bit of each id."""
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            _prefetch(words, _within(ids[i + _AHEAD], num_rows) >> 6)
        row = _within(ids[i], num_rows)
        words[row >> 6] |= 1 << (row & 63)
        summary[row >> 15] |= 1 << (row >> 9 & 63)


@_loop("int64(int64[::1], int64[::1], int64, int64[::1], int64[::1])")
def mark_new(words: _Ints, summary: _Ints, num_rows: int, ids: _Ints, fresh: _Ints) -> int:
    """Set the bit of each id; write the ids whose bit was clear to ``fresh``, ``[N]``, and return their number."""
    count = 0
    for i in range(ids.size):
        if i + _AHEAD < ids.size:
            _prefetch(words, _within(ids[i + _AHEAD], num_rows) >> 6)
        row = _within(ids[i], num_rows)
        word = words[row >> 6]
        fresh[count] = row  # no branch: it could not be foretold
        count += 1 - (word >> (row & 63) & 1)
        words[row >> 6] = word | 1 << (row & 63)
        summary[row >> 15] |= 1 << (row >> 9 & 63)
    return count


@_loop("void(int64[::1], int64, int64[::1], bool_[::1])")
def contains(words: _Ints, num_rows: int, ids: _Ints, found: NDArray[np.bool_]) -> None:
    """Write the bit of each id to ``found``, ``[N]``."""
    for i in range(ids.size):
        row = _within(ids[i], num_rows)
        found[i] = words[row >> 6] >> (row & 63) & 1 != 0


@_loop("void(int64[::1], int64[::1], int64[::1])")
def absorb(words: _Ints, other: _Ints, blocks: _Ints) -> None:
    """Add the given blocks of ``other``'s words."""
    for block in blocks:
        for i in range(block << 3, (block + 1) << 3):
            words[i] |= other[i]


@_loop("int64(int64[::1], int64[::1], int64)")
def count(words: _Ints, blocks: _Ints, width: int) -> int:
    """Count the bits set in the given blocks of ``width`` words each."""
    bits = 0
    for block in blocks:
        for i in range(block * width, (block + 1) * width):
            bits += _popcount(words[i])
    return bits


@_loop("void(int64[::1], int64[::1], int64, int64[::1])")
def unpack(words: _Ints, blocks: _Ints, width: int, out: _Ints) -> None:
    """Write the position of each bit that is set in the given blocks to ``out``, as long as :func:`count` says."""
    at = 0
    for block in blocks:
        for i in range(block * width, (block + 1) * width):
            word = words[i]
            while word:
                out[at] = (i << 6) + _lowest(word)
                word &= word - 1
                at += 1


@_loop("void(int64[::1], int64[::1], int64[::1])")
def count_before(words: _Ints, summary: _Ints, before: _Ints) -> None:
    """Write to ``before``, ``[B]``, how many rows are marked in all blocks before each."""
    rows = 0
    for block in range(before.size):
        before[block] = rows
        if summary[block >> 6] >> (block & 63) & 1:
            for i in range(block << 3, (block + 1) << 3):
                rows += _popcount(words[i])


@_loop("void(int64[::1], int64[::1], int64, int64[::1], int64[::1])")
def rank(words: _Ints, before: _Ints, num_rows: int, ids: _Ints, out: _Ints) -> None:
    """Write to ``out``, ``[N]``, how many rows below each id are marked, given what :func:`count_before` wrote."""
    for i in range(ids.size):
        row = _within(ids[i], num_rows)
        last = row >> 6
        rows = before[row >> 9] + _popcount(words[last] & ((1 << (row & 63)) - 1))
        for j in range(row >> 9 << 3, last):
            rows += _popcount(words[j])
        out[i] = rows
