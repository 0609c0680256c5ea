"""Cases of tables with raw ids: buckets, lookups, and owners that move or break a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.conformance.case import Case, Outcome, Run, Trial
from tests.conformance.maker import Block, Maker, Part, identity, owned_maker, plain_maker, table, table_2
from tests.conformance.stream import NO_OWNER, Tensor
from tests.stream.golden import reader as page

_BUCKETS = "**Buckets**: let `B` be the number of buckets"
_OWNERS = "A default row MUST NOT have an owner, and the bucket of an owner MUST contain its row"
_UNIQUE = "A raw id MUST NOT own two rows of a `list` or `gaps` block"
_VERSION = "A raw id MUST NOT own two rows of a version"
_AFTER = (
    "The owners of a version are those in its `all` blocks, with those in its `list` and `gaps` blocks written over"
)
_LEFT = "If a raw id of a version also owned a row that the version does not have, that row has no owner"
_ALL_COLUMNS = "Each of its blocks MUST have all columns, and all of its blocks in one entry MUST have one `encoding`"
_TENSOR = "Each block of a table with raw ids has a tensor `{i}.owners`"
_SNAPSHOT = "The first version that is not a claim after a change of `format`"

_ANY_IDS = [0, 1, -1, -2, NO_OWNER, NO_OWNER - 1, -(1 << 63), -(1 << 63) + 1, 1 << 62, (1 << 62) - 1, 123_456_789]


def _trial(make: Callable[[], Maker], outcome: Outcome = Outcome.RIGHT) -> Trial:
    """Return a trial of the newest version, with lookups of all owners of any version."""
    maker = make()
    version = maker.stream.versions[-1]
    if outcome is not Outcome.RIGHT:
        return Trial(maker.stream, outcome)
    asked = {fqn: [*maker.known[fqn], *_ANY_IDS] for fqn in maker.owners}
    for fqn, each in asked.items():
        count, hash_size = len(maker.tables[fqn]["identity"]["buckets"]), maker.tables[fqn]["identity"]["hash_size"]
        size = -(-hash_size // count)
        edges = [edge + more for edge in (size, 2 * size, size * count, hash_size) for more in (-1, 0, 1)]
        each += [(edge + (1 << 63)) % (1 << 64) - (1 << 63) for edge in edges]
    return Trial(maker.stream, outcome, maker.stream.expected(version, asked), raw_ids=asked)


def _buckets(hash_size: int, num_buckets: int, *, has_defaults: bool) -> Maker:
    """Three versions with random owners in buckets of 4 rows, the last one default."""
    spans = [(4 * number, 4 * number + 4, 4 * number + 3 if has_defaults else None) for number in range(num_buckets)]
    rule = identity(hash_size, *spans)
    maker = Maker({"r": table_2(4 * num_buckets, 2, identity=rule)})
    maker.claim()
    draw = np.random.default_rng(hash_size % 1000 + num_buckets)
    waiting: dict[int, list[int]] = {number: [] for number in range(num_buckets)}
    edges = [
        *_ANY_IDS,
        *(hash_size * part // num_buckets + more for part in range(num_buckets + 1) for more in (-1, 0, 1)),
    ]
    drawn = [int(each) for each in draw.integers(-(1 << 63), 1 << 63, 40 * num_buckets)]
    drawn += [int(each) for each in draw.integers(0, hash_size + 1, 40 * num_buckets)] if hash_size else []
    for raw_id in dict.fromkeys([each for each in edges if each < 1 << 63] + drawn):
        if raw_id != NO_OWNER:
            waiting[page.bucket_of(rule, raw_id)].append(raw_id)
    for version in range(3):
        rows = [row for first, end, default in spans for row in range(first, end) if row != default]
        changed = [row for row in rows if version == 0 or draw.random() < 0.5]
        for row in changed:
            free = waiting[row // 4]
            maker.own("r", row, free.pop(0) if free and draw.random() < 0.8 else NO_OWNER)
        if version:
            maker.delta(maker.block("r", changed))
        else:
            maker.snapshot()
    return maker


def _maker(rule: dict[str, Any] | None = None) -> Maker:
    """Return a maker with a claim and a table with raw ids."""
    maker = Maker({"r": table_2(8, 2, identity=rule or identity(100, (0, 5, 4), (5, 8, 7)))})
    maker.claim()
    return maker


def _moved_while_copied() -> Maker:
    """A raw id that owns two rows of a whole block; the listed rows decide."""
    maker = _maker()
    maker.own("r", 1, 42)
    maker.own("r", 3, 42)
    whole = maker.block("r")
    maker.own("r", 1, NO_OWNER)
    maker.own("r", 0, 5)
    maker.snapshot([Part([maker.block("r", [0, 1, 3])]), Part([whole])])
    return maker


def _moves() -> Maker:
    """Raw ids that move to other rows, and rows that change hands."""
    maker = _maker()
    for row, owner in ((0, 1), (1, 2), (2, 3), (5, 50), (6, 51)):
        maker.own("r", row, owner)
    maker.snapshot()
    for row, owner in ((0, 2), (1, 3), (2, 1), (6, 50), (5, NO_OWNER)):
        maker.own("r", row, owner)
    maker.delta(maker.block("r", [0, 1, 2, 5, 6], form="gaps"))
    maker.own("r", 1, NO_OWNER)
    maker.own("r", 3, 3)
    maker.delta(maker.block("r", rows=(0, 5)))
    return maker


def _left_behind() -> Maker:
    """A version that gives a raw id a row, but does not have the row that it owned."""
    maker = _maker()
    maker.own("r", 1, 42)
    maker.snapshot()
    maker.own("r", 2, 42)
    maker.delta(maker.block("r", [2]))
    return maker


def _other_buckets() -> Maker:
    """A snapshot with other buckets and owners."""
    maker = owned_maker()
    maker.tables["r"] = table_2(8, 2, identity=identity(17, (0, 2, 0), (2, 6, 5), (6, 8, 6)))
    maker.owners["r"][:] = NO_OWNER
    maker.own("r", 1, 3)
    maker.own("r", 3, 6)
    maker.snapshot()
    maker.own("r", 4, 7)
    maker.delta(maker.block("r", [4]))
    return maker


def _no_longer() -> Maker:
    """A snapshot of format 1 after versions with raw ids."""
    maker = owned_maker()
    maker.tables, maker.format, maker.owners = {"t": table(3, 2), "r": table(8, 2)}, 1, {}
    maker.snapshot()
    maker.delta(maker.block("r", [4]))
    return maker


def _at_last() -> Maker:
    """A snapshot of format 2 after versions of format 1."""
    maker = plain_maker()
    maker.tables, maker.format = {"t": table_2(3, 2, identity=identity(0, (0, 3, None)))}, 2
    maker.owners = {"t": np.full(3, NO_OWNER, "<i8")}
    maker.own("t", 1, 99)
    maker.snapshot()
    return maker


def _encoded(encoding: str) -> Maker:
    maker = _maker()
    maker.own("r", 1, 42)
    maker.snapshot([Part([maker.block("r", encoding=encoding), maker.block("r", [1, 6], encoding=encoding)])])
    return maker


_GOOD: dict[str, tuple[str, Callable[[], Maker]]] = {
    "a raw id that moved while it was copied": (_AFTER, _moved_while_copied),
    "raw ids that move": (_AFTER, _moves),
    "a raw id that leaves a row that the version does not have": (_LEFT, _left_behind),
    "a snapshot with other buckets": (_SNAPSHOT, _other_buckets),
    "a snapshot of format 1": (_SNAPSHOT, _no_longer),
    "a snapshot of format 2 after format 1": (_SNAPSHOT, _at_last),
    **{f"owners of {each} rows": (_ALL_COLUMNS, partial(_encoded, each)) for each in ("F16", "BF16", "INT8", "INT4")},
}


# Owners that a version must not have. All tensors are well-formed.


def _owned(*owners: tuple[int, int], ids: Sequence[int] | None = (1, 2, 4, 5), form: str = "list") -> Maker:
    """A delta after :func:`owned_maker` with these owners of rows of r; 49 owns row 1, and 3 owns row 3."""
    maker = owned_maker()
    for row, owner in owners:
        maker.owners["r"][row] = owner
    maker.delta(maker.block("r", ids, form=form))
    return maker


def _two_blocks(*, is_whole: bool) -> Maker:
    """A raw id with a row in each of two blocks."""
    maker = owned_maker()
    maker.owners["r"][:] = NO_OWNER
    maker.own("r", 1, 42)
    maker.own("r", 3, 42)
    spans = (0, 2), (2, 8)
    blocks = [maker.block("r", None if is_whole else [1 if span[0] == 0 else 3], rows=span) for span in spans]
    maker.delta(*blocks)
    return maker


def _whole_and_listed() -> Maker:
    """A raw id with a row of a whole block, and a listed one outside of it."""
    maker = owned_maker()
    maker.owners["r"][:] = NO_OWNER
    maker.own("r", 1, 42)
    maker.own("r", 3, 42)
    maker.delta(maker.block("r", rows=(0, 2)), maker.block("r", [3]))
    return maker


def _hidden_default() -> Maker:
    """An owner of a default row in a whole block, under a listed row without an owner."""
    maker = owned_maker()
    maker.owners["r"][4] = 5
    whole = maker.block("r")
    maker.owners["r"][4] = NO_OWNER
    maker.delta(whole, maker.block("r", [4]))
    return maker


def _changed(change: Callable[[Block], object]) -> Maker:
    """A delta whose block of r is changed."""
    maker = owned_maker()
    block = maker.block("r", [1, 2])
    change(block)
    maker.delta(block)
    return maker


def _unowned_table() -> Maker:
    maker = owned_maker()
    block = maker.block("t", [1])
    block.tensors["owners"] = Tensor.of(np.array([NO_OWNER]), "I64")
    maker.delta(block)
    return maker


def _encodings() -> Maker:
    maker = owned_maker()
    maker.delta(maker.block("r", [1]), maker.block("r", rows=(6, 8), encoding="INT8"))
    return maker


def _some_columns() -> Maker:
    maker = owned_maker()
    maker.delta(maker.block("r", [1], columns=(0, 1)))
    return maker


def _format_1_delta() -> Maker:
    maker = owned_maker()
    maker.format, maker.owners = 1, {}
    maker.tables = {fqn: table(each["num_rows"], each["dim"], each["dtype"]) for fqn, each in maker.tables.items()}
    maker.delta(maker.block("r", [1]))
    return maker


def _no_identity() -> Maker:
    """A delta in which a table has no raw ids any more."""
    maker = owned_maker()
    maker.owners, maker.tables["r"] = {"s": maker.owners["s"]}, table_2(8, 2)
    maker.delta(maker.block("r", [1]))
    return maker


def _late_identity() -> Maker:
    """A delta in which a table gets raw ids."""
    maker = Maker({"r": table_2(8, 2), "t": table_2(2, 2, identity=identity(0, (0, 2, None)))})
    maker.claim()
    maker.snapshot()
    maker.tables["r"] = table_2(8, 2, identity=identity(0, (0, 8, None)))
    maker.owners["r"] = np.full(8, NO_OWNER, "<i8")
    maker.delta(maker.block("r", [1]))
    return maker


_BAD: dict[str, tuple[str, Callable[[], Maker]]] = {
    "a raw id with two listed rows": (_UNIQUE, partial(_owned, (1, 49), (2, 49))),
    "a raw id with two rows in gaps": (_UNIQUE, partial(_owned, (1, 49), (2, 49), form="gaps")),
    "a raw id with two rows in two lists": (_VERSION, partial(_two_blocks, is_whole=False)),
    "a raw id with two rows in two whole blocks": (_VERSION, partial(_two_blocks, is_whole=True)),
    "a raw id with two rows of a whole block": (_VERSION, partial(_owned, (1, 49), (2, 49), ids=None)),
    "a raw id with a whole and a listed row": (_VERSION, _whole_and_listed),
    "an owner in another bucket": (_OWNERS, partial(_owned, (5, 48))),
    "an owner in another bucket of a whole block": (_OWNERS, partial(_owned, (2, 50), ids=None)),
    "a negative owner in another bucket": (_OWNERS, partial(_owned, (2, -1))),
    "an owner beyond hash_size in another bucket": (_OWNERS, partial(_owned, (2, 101))),
    "an owner of a default row": (_OWNERS, partial(_owned, (4, 5))),
    "an owner of a default row of a whole block": (_OWNERS, partial(_owned, (4, 5), ids=None)),
    "an owner of a default row under a listed row": (_OWNERS, _hidden_default),
    "no owners": (_TENSOR, partial(_changed, lambda block: block.tensors.pop("owners"))),
    "owners of another dtype": (
        _TENSOR,
        partial(_changed, lambda block: block.tensors.update(owners=Tensor("F64", (2,), bytes(16)))),
    ),
    "owners of another shape": (
        _TENSOR,
        partial(_changed, lambda block: block.tensors.update(owners=Tensor("I64", (2, 1), b"\xff" * 7 + b"\x7f" * 9))),
    ),
    "an owner too few": (
        _TENSOR,
        partial(_changed, lambda block: block.tensors.update(owners=Tensor("I64", (1,), b"\xff" * 7 + b"\x7f"))),
    ),
    "owners of a table without raw ids": ("The part MUST hold exactly the tensors", _unowned_table),
    "some columns": (_ALL_COLUMNS, _some_columns),
    "two encodings": (_ALL_COLUMNS, _encodings),
    "a delta of format 1": (_SNAPSHOT, _format_1_delta),
    "a delta without its raw ids": (_SNAPSHOT, _no_identity),
    "a delta with new raw ids": (_SNAPSHOT, _late_identity),
}


def cases() -> Iterator[Case]:
    for hash_size in (0, 1, 7, 100, 101, 1 << 40, (1 << 63) - 1, (1 << 62) + 1):
        for num_buckets in (1, 2, 3, 7):
            has_defaults = (hash_size + num_buckets) % 2 == 0
            rows = "default rows" if has_defaults else "no default rows"
            name = f"raw ids hash_size {hash_size} in {num_buckets} buckets with {rows}"
            trial = partial(_trial, partial(_buckets, hash_size, num_buckets, has_defaults=has_defaults))
            yield Run(name, _BUCKETS, trial)
    for name, (rule, make) in _GOOD.items():
        yield Run(f"raw ids {name}", rule, partial(_trial, make))
    for name, (rule, make) in _BAD.items():
        yield Run(f"raw ids {name}", rule, partial(_trial, make, Outcome.REFUSED))
