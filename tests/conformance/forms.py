"""Cases of well-formed versions: encodings, dtypes, forms of ids, and everything that readers must not assume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from tests.conformance.case import Case, Outcome, Run, Trial
from tests.conformance.maker import Block, Maker, Part, identity, plain_maker, table, table_2
from tests.conformance.stream import Tensor

_ENCODINGS = "**Encodings** of `C` columns"
_GAPS = "**Gaps**: byte k is the number of ids skipped between id k-1 and id k"
_ORDER = "Write the rows of all `all` blocks in any order. **Then** write the rows of the other blocks"
_ASSUME = "Readers MUST NOT assume"
_BLOCKS = "Per table, `all` blocks MUST be disjoint rectangles, and so MUST the `list` and `gaps` blocks together"
_COVER = "In a snapshot the `all` blocks MUST cover each table exactly"
_DENSE = "Dense dtypes are `F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL`"

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
# Ties and limits of the roundings to float16 and bfloat16, and numbers that are special in one of them.
_SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 65504.0, 65519.99, 65520.0, -65520.0, 6.1e-5, 5.96e-8, 2.98e-8, 2.99e-8, -8.9e-8, 1e-40,
    -1e-45, np.inf, -np.inf, 3.4028235e38, 3.39e38, 1.00048828125, 1.00146484375, 1.00390625, 1.01171875, 1 / 3,
    -2049.0, 2051.0,
]  # fmt: skip


def _trial(make: Callable[[], Maker], outcome: Outcome = Outcome.RIGHT) -> Trial:
    """Return a trial of the newest version of a maker's stream."""
    stream = make().stream
    version = stream.versions[-1]
    return Trial(stream, outcome, stream.expected(version) if outcome is Outcome.RIGHT else {})


def _started(**tables: dict[str, Any]) -> Maker:
    """Return a maker with a claim."""
    maker = Maker(tables)
    maker.claim()
    return maker


def _encoded(encoding: str, dtype: str) -> Maker:
    """All forms of ids in an encoding."""
    maker = _started(t=table(700, 6, dtype))
    maker.snapshot([Part([maker.block("t", encoding=encoding)])])
    maker.delta(maker.block("t", [0, 5, 699], encoding=encoding))
    maker.delta(maker.block("t", [1, 5, 300, 698], form="gaps", encoding=encoding, columns=(2, 6)))
    return maker


def _special(encoding: str, dtype: str) -> Maker:
    """Numbers that are rounded, overflow or are subnormal."""
    with np.errstate(over="ignore"):
        values = np.array(_SPECIAL, "<f4").reshape(-1, 2).astype("<f2" if encoding == "F16" else "<f4")
    maker = _started(t=table(len(values), 2, dtype))
    maker.snapshot([Part([maker.block("t", encoding=encoding, values=values)])])
    return maker


def _quantized(encoding: str, dtype: str) -> Maker:
    """Scales and biases that are large, small, negative and subnormal."""
    large, small, small_bias = (3e37, 1e-41, 1e-45) if encoding == "INT8" else (60000.0, 6e-8, -6e-8)
    pairs = [
        (1.0, 0.0), (-0.5, 3.0), (0.1, 1 / 3), (large, 0.0), (large, -large), (small, small_bias), (small, 1.0),
        (1e-3, 2048.0), (0.0, -0.0), (0.0, 5.5), (1 / 255, -1.0), (-large, large),
    ]  # fmt: skip
    codes = np.arange(256, dtype=np.uint8) if encoding == "INT8" else np.arange(0, 256, 7, dtype=np.uint8)
    dtype_of_scale = "<f4" if encoding == "INT8" else "<f2"
    rows = [np.concatenate([codes, np.array(pair, dtype_of_scale).view(np.uint8)]) for pair in pairs]
    maker = _started(t=table(len(rows), len(codes) * (1 if encoding == "INT8" else 2), dtype))
    maker.snapshot([Part([maker.block("t", encoding=encoding, values=np.stack(rows))])])
    return maker


def _gapped(ids: list[int], num_rows: int) -> Maker:
    maker = _started(t=table(num_rows, 1))
    maker.snapshot()
    maker.delta(maker.block("t", ids, form="gaps"))
    return maker


_IDS: dict[str, tuple[list[int], int]] = {
    "none": ([], 5),
    "only the first": ([0], 5),
    "only the last": ([4], 5),
    "all": (list(range(1000)), 1000),
    "of 253, 254, 255 and 256": ([253, 508, 764, 1021], 1022),
    "of 255 at the beginning": ([255, 256], 257),
    "only of escapes": (list(range(300, 90_001, 300)), 90_001),
    "of escapes above 65535": ([65_535, 65_536, 140_000, 299_999], 300_000),
}


def _listed_first() -> Maker:
    """Listed rows in the first part, in a later part than their whole block, and with some columns."""
    maker = _started(t=table(12, 4), u=table(6, 2, "F16"))
    parts = [
        Part([maker.block("t", [0, 3, 11], columns=(0, 3)), maker.block("u", [5], form="gaps")]),
        Part([maker.block("t", rows=(0, 7)), maker.block("u")]),
        Part([maker.block("t", rows=(7, 12)), maker.block("t", [3, 10], columns=(3, 4), form="gaps")]),
    ]
    maker.snapshot(parts)
    return maker


def _listed_in_delta() -> Maker:
    maker = _started(t=table(12, 4))
    maker.snapshot()
    maker.delta(
        maker.block("t", [2, 6], encoding="F16"), maker.block("t", rows=(1, 8), columns=(1, 4), encoding="INT8")
    )
    return maker


def _many_blocks() -> Maker:
    """A table in 60 rectangles, some of them empty, in three parts, and lists in as many."""
    maker = _started(t=table(20, 12))
    edges = [0, 1, 3, 6, 7, 9, 12, 13, 15, 18, 20]
    spans = [(rows, (column, column + 3)) for rows in pairwise(edges) for column in (0, 3, 6, 9)]
    blocks = [maker.block("t", rows=rows, columns=columns) for rows, columns in spans]
    blocks.append(maker.block("t", rows=(5, 5)))
    maker.snapshot([Part(blocks[::3]), Part(), Part(blocks[1::3]), Part(blocks[2::3])])
    listed = [maker.block("t", [rows[0]], rows=rows, columns=columns) for rows, columns in spans]
    maker.commit("delta", [Part(listed[number::3]) for number in range(3)])
    return maker


def _no_rows() -> Maker:
    """Versions without rows, parts and tables."""
    maker = plain_maker()
    maker.delta(maker.block("t", []), maker.block("h", [], form="gaps"), maker.block("u", rows=(7, 7)))
    maker.commit("delta", [])
    maker.commit("delta", [], tables={}, dense={})
    maker.commit("delta", [Part()], tables={}, dense={})
    return maker


def _empty_table() -> Maker:
    maker = _started(t=table(0, 4), u=table(3, 1))
    maker.snapshot([Part([maker.block("u")])])
    maker.delta(maker.block("t", []), maker.block("t", rows=(0, 0)))
    return maker


def _dense() -> Maker:
    maker = _started(t=table(2, 1))
    draw = np.random.default_rng(3)
    shapes: list[tuple[int, ...]] = [(), (0,), (3,), (2, 0, 5), (1,) * 16, (2, 3)]
    tensors = {}
    for dtype, num_bytes in _SIZES.items():
        for shape in shapes:
            data = draw.integers(0, 2 if dtype == "BOOL" else 120, num_bytes * int(np.prod(shape)), np.uint8).tobytes()
            tensors[f"{dtype.lower()}/{shape}"] = Tensor(dtype, shape, data)
    names = list(tensors)
    first, second = ({name: tensors[name] for name in names[number::2]} for number in range(2))
    maker.snapshot([Part([maker.block("t")], first), Part([], second)])
    some = {name: each for name, each in tensors.items() if each.shape == (3,)}
    newer = {name: Tensor(each.dtype, each.shape, bytes(len(each.data))) for name, each in some.items()}
    maker.commit("delta", [Part([], newer)])
    return maker


def _names() -> Maker:
    names = ["a/b", 'quote"s', "back\\slash", "ünï\U0001f600", "new\nline", "0.values", " ", "a" * 500]
    tables = {name: table(3, 1) for name in names}
    maker = Maker(tables)
    maker.claim()
    maker.snapshot()
    maker.delta(*(maker.block(fqn, [1]) for fqn in reversed(tables)))
    return maker


def _part_names() -> Maker:
    """Parts whose names say nothing."""
    maker = plain_maker()
    for number, name in enumerate(["0", "-", "z" * 200, "99999999999999999999-g9-r0-0000000000000001"]):
        version = maker.delta(maker.block("t", [number]))
        entry = maker.stream.entry(version)
        (part,) = entry["parts"]
        maker.stream.objects[f"parts/{name}.safetensors"] = maker.stream.objects.pop(part["name"])
        part["name"] = f"parts/{name}.safetensors"
        maker.stream.put_entry(version, entry)
    return maker


def _times() -> Maker:
    maker = plain_maker()
    maker.delta(maker.block("t", [1]), cut=0, created=2**53 - 1, batches=[0, 0])
    maker.delta(maker.block("t", [2]), cut=1e-300, created=0, batches=[2**63 - 1, 2**63 - 1])
    return maker


def _late_start() -> Maker:
    """A log that begins above 2^40."""
    maker = Maker({"t": table(4, 2)}, first=1 << 40)
    maker.claim(parent={"version": (1 << 40) - 1, "xxh3": "0" * 32})
    maker.snapshot()
    maker.delta(maker.block("t", [3]))
    return maker


def _columns() -> Maker:
    """Several column ranges and states in one stream of format 2, next to a table with raw ids."""
    spec = table_2(6, 5, has_states=True) | {"columns": [[0, 2], [2, 5]]}
    maker = _started(t=spec, r=table_2(4, 2, identity=identity(10, (0, 4, None))))
    maker.snapshot(
        [Part([maker.block("t", columns=columns) for columns in ((0, 2), (2, 5))]), Part([maker.block("r")])]
    )
    maker.delta(maker.block("t", [5], columns=(2, 5)), maker.block("t", [1, 4], columns=(0, 2), form="gaps"))
    return maker


_GOOD: dict[str, tuple[str, Callable[[], Maker]]] = {
    "listed rows before and after their whole blocks": (_ORDER, _listed_first),
    "listed rows over whole blocks of a delta": (_ORDER, _listed_in_delta),
    "many blocks": (_BLOCKS, _many_blocks),
    "versions without rows, parts and tables": (_ASSUME, _no_rows),
    "a table without rows": (_COVER, _empty_table),
    "dense tensors of all dtypes": (_DENSE, _dense),
    "unusual names of tables": ("| `tables` | object | name to", _names),
    "unusual names of parts": ("anything about the name of a part", _part_names),
    "times that descend": ("that times ascend", _times),
    "a log that begins late": ("Old entries may be deleted", _late_start),
    "several column ranges": ("1 to 65,536 ranges with at least one column each", _columns),
}


# Blocks that a version must not have. All tensors are right.


def _delta(*blocks: Callable[[Maker], Block]) -> Maker:
    maker = plain_maker()
    maker.delta(*(block(maker) for block in blocks))
    return maker


def _snapshot(*blocks: Callable[[Maker], Block]) -> Maker:
    maker = plain_maker()
    maker.snapshot([Part([maker.block("h"), maker.block("u"), *(block(maker) for block in blocks)])])
    return maker


def _of(*args: Any, **kwargs: Any) -> Callable[[Maker], Block]:
    return lambda maker: maker.block("t", *args, **kwargs)


def _odd_columns() -> Maker:
    maker = plain_maker()
    values = np.zeros((1, 5), np.uint8)
    maker.delta(maker.block("t", [1], columns=(0, 3), encoding="INT4", values=values))
    return maker


_BAD: dict[str, tuple[str, Callable[[], Maker]]] = {
    "listed rows that overlap": (_BLOCKS, partial(_delta, _of([1], rows=(0, 6)), _of([7], rows=(5, 10)))),
    "listed columns that overlap": (_BLOCKS, partial(_delta, _of([1], columns=(0, 3)), _of([7], columns=(2, 4)))),
    "list and gaps that overlap": (_BLOCKS, partial(_delta, _of([1]), _of([7], form="gaps"))),
    "empty lists that overlap": (_BLOCKS, partial(_delta, _of([]), _of([]))),
    "whole blocks that overlap": (_BLOCKS, partial(_delta, _of(rows=(0, 6)), _of(rows=(5, 10)))),
    "the same whole block twice": (_BLOCKS, partial(_delta, _of(rows=(2, 4)), _of(rows=(2, 4)))),
    "INT4 of an odd number of columns": ("`INT4` with an even number of columns", _odd_columns),
    "a snapshot without a row": (_COVER, partial(_snapshot, _of(rows=(0, 9)))),
    "a snapshot without a column": (_COVER, partial(_snapshot, _of(columns=(0, 3)))),
    "a snapshot with a hole": (_COVER, partial(_snapshot, _of(rows=(0, 5)), _of(rows=(5, 10), columns=(0, 3)))),
    "a snapshot without a table": (_COVER, _snapshot),
    "a snapshot with all rows listed": (_COVER, partial(_snapshot, _of(list(range(10))))),
    "a snapshot with a list for a hole": (_COVER, partial(_snapshot, _of(rows=(0, 9)), _of([9]))),
    "a snapshot whose blocks overlap": (_COVER, partial(_snapshot, _of(), _of(rows=(3, 4)))),
}


def cases() -> Iterator[Case]:
    for encoding in ("F32", "F16", "BF16", "INT8", "INT4"):
        for dtype in ("F32", "F16", "BF16"):
            name = f"{encoding} in a table of {dtype}"
            yield Run(f"form {name}", _ENCODINGS, partial(_trial, partial(_encoded, encoding, dtype)))
            special = _quantized if encoding.startswith("INT") else _special
            yield Run(f"form special numbers of {name}", _ENCODINGS, partial(_trial, partial(special, encoding, dtype)))
    for name, (ids, num_rows) in _IDS.items():
        yield Run(f"form gaps {name}", _GAPS, partial(_trial, partial(_gapped, ids, num_rows)))
    for outcome, table_of_cases in ((Outcome.RIGHT, _GOOD), (Outcome.REFUSED, _BAD)):
        for name, (rule, make) in table_of_cases.items():
            yield Run(f"form {name}", rule, partial(_trial, make, outcome))
