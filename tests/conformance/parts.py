"""Cases of parts: each breaks one rule, or uses a freedom that readers must allow."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.conformance.case import Case, Outcome, Run, Trial
from tests.conformance.maker import Maker, Part, owned, plain, plain_maker, table, table_2
from tests.conformance.stream import (
    Stream,
    Tensor,
    Tensors,
    file_of,
    file_with_digests,
    seal,
    tensors_of,
    xxh3,
)
from tests.stream.golden import reader as page

_SIZE = "`num_bytes` against the object"
_HASH = "the size, xxh3, header and ids of each part"
_LAYOUT = "8 bytes with the length of the header in little-endian"
_GAPLESS = "without gaps from the first byte of the data to the end of the file"
_HEADER_LIMIT = "The header has at most 64 MiB"
_FIELDS = "the tensors of a header have no unknown"
_EXACTLY = "The part MUST hold exactly the tensors that its record implies"
_IDS = "global ids, ascending, unique, inside `rows`"
_GAPS = "`gaps`: a zlib stream of `num_rows` bytes"
_ESCAPES = "All escapes MUST be used"
_BOOL = "a BOOL is a byte 0 or 1"
_DIGESTS = "A reader of the whole object MUST check every digest"
_LAST = "Every object of format 2 ends with a tensor `digests`"

_HUGE = [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def _trial(make: Callable[[], Stream], change: Callable[[Stream], object], outcome: Outcome = Outcome.REFUSED) -> Trial:
    stream = make()
    expected = stream.expected(3) if outcome is not Outcome.REFUSED else {}
    change(stream)
    return Trial(stream, outcome, expected)


def _data(stream: Stream) -> bytes:
    return stream.objects[stream.entry(3)["parts"][0]["name"]]


# Bytes of a part. The record has the size and the hash of the bytes, if it is sealed.


def _flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if at >= 0 else _flip(len(data) + at)(data)


def _header_length(change: Callable[[int, int], int]) -> Callable[[bytes], bytes]:
    """Return a change of the header's length, computed from the length and the size of the part."""
    return lambda data: change(int.from_bytes(data[:8], "little"), len(data)).to_bytes(8, "little") + data[8:]


def _header_text(change: Callable[[str], str | bytes]) -> Callable[[bytes], bytes]:
    """Return a change of the header's text; the length of the header is changed with it."""

    def edit(data: bytes) -> bytes:
        start = 8 + int.from_bytes(data[:8], "little")
        changed = change(data[8:start].decode())
        head = changed.encode() if isinstance(changed, str) else changed
        return len(head).to_bytes(8, "little") + head + data[start:]

    return edit


def _padded(text: str) -> str:
    return text + " " * (-len(text.encode()) % 8)


_UNSEALED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    **{f"a flipped bit at byte {at}": (_HASH, _flip(at)) for at in (0, 7, 8, 60, -1, -20, -400)},
    "a byte less": (_SIZE, lambda data: data[:-1]),
    "8 bytes less": (_SIZE, lambda data: data[:-8]),
    "a byte more": (_SIZE, lambda data: data + b"\0"),
    "no bytes": (_SIZE, lambda _: b""),
    "other bytes of the same size": (_HASH, lambda data: bytes(len(data))),
}
_SEALED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a byte less": (_GAPLESS, lambda data: data[:-1]),
    "only the header": (_GAPLESS, lambda data: data[: 8 + int.from_bytes(data[:8], "little")]),
    "8 bytes more": (_GAPLESS, lambda data: data + bytes(8)),
    "one byte": (_LAYOUT, lambda _: b"{"),
    "seven bytes": (_LAYOUT, lambda _: b"\1\0\0\0\0\0\0"),
    "eight zeros": (_LAYOUT, lambda _: bytes(8)),
    **{
        f"a header of {size} bytes": (_LAYOUT, _header_length(lambda _, __, size=size: size))
        for size in (0, 1, 8, *_HUGE)
    },
    "a header up to the end": (_LAYOUT, _header_length(lambda _, size: size - 8)),
    "a header beyond the end": (_LAYOUT, _header_length(lambda _, size: size - 7)),
    "a header 8 bytes too short": (_LAYOUT, _header_length(lambda length, _: length - 8)),
    "a header 8 bytes too long": (_LAYOUT, _header_length(lambda length, _: length + 8)),
    "a header that is not padded": (
        "the data begins at a multiple of 8",
        _header_text(lambda text: _padded(text) + " "),
    ),
    "a header of more than 64 MiB": (_HEADER_LIMIT, _header_text(lambda text: _padded(text) + " " * (64 << 20))),
    "a header padded with NUL": ("padded with spaces", _header_text(lambda text: _padded(text) + "\0" * 8)),
    "a header that is an array": ("the JSON header", _header_text(lambda text: _padded(f"[{text}]"))),
    "a header that is no JSON": ("the JSON header", _header_text(lambda text: text.replace("{", "[", 1))),
    "a header with invalid UTF-8": (
        "the JSON header",
        _header_text(lambda text: text.encode().replace(b"values", b"value\xff")),
    ),
    "a header with a tensor twice": (
        "Readers MUST reject an object with a duplicate name",
        _header_text(lambda text: _padded('{"0.ids":{"dtype":"I64","shape":[3],"data_offsets":[0,24]},' + text[1:])),
    ),
    "a header with a field twice": (
        "Readers MUST reject an object with a duplicate name",
        _header_text(lambda text: _padded(text.replace('"dtype"', '"dtype":"I64","dtype"', 1))),
    ),
    "an empty __metadata__": (
        "There MUST be no `__metadata__`",
        _header_text(lambda text: _padded('{"__metadata__":{},' + text[1:])),
    ),
    "__metadata__": (
        "There MUST be no `__metadata__`",
        _header_text(lambda text: _padded('{"__metadata__":{"a":"b"},' + text[1:])),
    ),
}


# Headers whose data do not change. The tensors of entry 3 are t: 0.ids, 0.values; h: 1.ids, ...; u: 2.gaps, ...


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[Stream], None]:
    """Return a change of the header of the part; the data stay."""

    def edit(stream: Stream) -> None:
        stream.put_part(3, 0, _built(stream, stream.tensors(3, 0), change))

    return edit


def _built(stream: Stream, tensors: Tensors, change: Callable[[dict[str, Any]], object] | None = None) -> bytes:
    return (file_with_digests if stream.entry(3)["format"] == 2 else file_of)(tensors, change)


def _shift(header: dict[str, Any], name: str, begin: int, end: int) -> None:
    offsets = header[name]["data_offsets"]
    header[name]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]


def _swap(header: dict[str, Any], one: str, other: str) -> None:
    header[one], header[other] = header[other], header[one]


_BAD_HEADERS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a missing tensor": (_EXACTLY, lambda header: header.pop("1.values")),
    "a tensor too many": (
        _EXACTLY,
        lambda header: header.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    ),
    "an empty tensor too many": (
        _EXACTLY,
        lambda header: header.update({"3.values": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}}),
    ),
    "a tensor of another name": (_EXACTLY, lambda header: header.update({"0.idx": header.pop("0.ids")})),
    "a name with a leading zero": (_EXACTLY, lambda header: header.update({"00.ids": header.pop("0.ids")})),
    "overlapping tensors": (_GAPLESS, lambda header: _shift(header, "1.values", -8, -8)),
    "a gap between tensors": (_GAPLESS, lambda header: _shift(header, "1.values", 8, 8)),
    "a tensor that begins before the data": (_GAPLESS, lambda header: _shift(header, "0.values", -8, -8)),
    "a tensor that is used twice": (_GAPLESS, lambda header: header["1.ids"].update(header["0.ids"])),
    "reversed offsets": (_GAPLESS, lambda header: header["0.ids"]["data_offsets"].reverse()),
    "offsets that are floats": (_EXACTLY, lambda header: header["0.ids"].update(data_offsets=[48.0, 72.0])),
    "one offset": (_EXACTLY, lambda header: header["0.ids"].update(data_offsets=[48])),
    "three offsets": (_EXACTLY, lambda header: header["0.ids"].update(data_offsets=[48, 72, 72])),
    "huge offsets": (_EXACTLY, lambda header: header["0.ids"].update(data_offsets=[48, 2**64 + 72])),
    "no offsets": (_EXACTLY, lambda header: header["0.ids"].pop("data_offsets")),
    "another dtype of the same size": (_EXACTLY, lambda header: header["0.ids"].update(dtype="F64")),
    "an unknown dtype": (_EXACTLY, lambda header: header["0.ids"].update(dtype="i64")),
    "no dtype": (_EXACTLY, lambda header: header["0.ids"].pop("dtype")),
    "another shape of the same size": (_EXACTLY, lambda header: header["0.values"].update(shape=[4, 3])),
    "a flat shape": (_EXACTLY, lambda header: header["0.values"].update(shape=[12])),
    "a shape with another dimension": (_EXACTLY, lambda header: header["0.ids"].update(shape=[3, 1])),
    "a shape of floats": (_EXACTLY, lambda header: header["0.ids"].update(shape=[3.0])),
    "a negative shape": (_EXACTLY, lambda header: header["0.values"].update(shape=[-3, -4])),
    "a huge shape": (_EXACTLY, lambda header: header["0.values"].update(shape=[2**62 + 3, 4])),
    "a shape of null": (_EXACTLY, lambda header: header["0.ids"].update(shape=None)),
    "a longer length of gaps": (_EXACTLY, lambda header: header["2.gaps"].update(shape=[2**63])),
    "a length of gaps of true": (_EXACTLY, lambda header: header["2.escapes"].update(shape=[True])),
    "a tensor with another field": (_FIELDS, lambda header: header["0.ids"].update(x=1)),
    "a tensor with a null field": (_FIELDS, lambda header: header["0.ids"].update(strides=None)),
    "null for a tensor": (_EXACTLY, lambda header: header.update({"0.ids": None})),
    "swapped tensors": (_EXACTLY, lambda header: _swap(header, "0.ids", "1.values")),
}


# Tensors of a part. The file is well-formed, and the record has its size and hash.


def _tensors(change: Callable[[Tensors], object]) -> Callable[[Stream], None]:
    """Return a change of the tensors of the part."""

    def edit(stream: Stream) -> None:
        tensors = stream.tensors(3, 0)
        change(tensors)
        stream.put_tensors(3, 0, tensors)

    return edit


def _ids(name: str, *ids: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: Tensor.of(np.array(ids, "<i8"), "I64")})


def _gaps(change: Callable[[bytes], bytes], *escapes: int) -> Callable[[Tensors], object]:
    """Return a change of the gaps in the block 2: 3, 255, 0 and 255 with the escapes 255 and 338."""

    def edit(tensors: Tensors) -> None:
        gaps = change(tensors["2.gaps"].data)
        tensors["2.gaps"] = Tensor("U8", (len(gaps),), gaps)
        if escapes:
            _ids("2.escapes", *escapes)(tensors)

    return edit


def _gap_bytes(*gaps: int) -> Callable[[bytes], bytes]:
    return lambda _: zlib.compress(bytes(gaps))


def _raw(data: bytes, wbits: int, level: int = 6) -> bytes:
    compressor = zlib.compressobj(level, zlib.DEFLATED, wbits)
    return compressor.compress(zlib.decompress(data)) + compressor.flush()


def _with_dictionary(data: bytes) -> bytes:
    compressor = zlib.compressobj(zdict=b"\3\xff\0\xff")
    return compressor.compress(zlib.decompress(data)) + compressor.flush()


def _zeros(num_bytes: int) -> bytes:
    """Return a zlib stream of zeros, from repeated blocks of 1 MiB."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = compressor.compress(bytes(1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    checksum = (num_bytes % 65521) << 16 | 1
    return b"\x78\xda" + block * (num_bytes >> 20) + compressor.flush() + checksum.to_bytes(4, "big")


_BAD_TENSORS: dict[str, tuple[str, Callable[[Tensors], object]]] = {
    "descending ids": (_IDS, _ids("0.ids", 0, 9, 4)),
    "equal ids": (_IDS, _ids("0.ids", 0, 4, 4)),
    "an id beyond the rows": (_IDS, _ids("0.ids", 0, 4, 10)),
    "a negative id": (_IDS, _ids("0.ids", -1, 4, 9)),
    "the largest id": (_IDS, _ids("0.ids", 0, 4, 2**63 - 1)),
    "the smallest id": (_IDS, _ids("0.ids", -(2**63), 4, 9)),
    "an id that wraps around in 32 bits": (_IDS, _ids("0.ids", 0, 4, 2**32 + 9)),
    "an id too few": (_EXACTLY, _ids("0.ids", 0, 4)),
    "an id too many": (_EXACTLY, _ids("0.ids", 0, 4, 8, 9)),
    "no gaps": (_GAPS, _gaps(lambda _: b"")),
    "gaps that are not compressed": (_GAPS, _gaps(zlib.decompress)),
    "gaps as raw deflate": (_GAPS, _gaps(lambda data: _raw(data, -15))),
    "gaps as gzip": (_GAPS, _gaps(lambda data: _raw(data, 31))),
    "gaps with a dictionary": (_GAPS, _gaps(_with_dictionary)),
    "gaps that are truncated": (_GAPS, _gaps(lambda data: data[:-1])),
    "gaps without a checksum": (_GAPS, _gaps(lambda data: data[:-4])),
    "gaps with a wrong checksum": (_GAPS, _gaps(lambda data: data[:-1] + bytes([data[-1] ^ 1]))),
    "gaps with bytes after the stream": (_GAPS, _gaps(lambda data: data + b"\0")),
    "gaps of two streams": (_GAPS, _gaps(lambda data: data + zlib.compress(b""))),
    "gaps of a row too few": (_GAPS, _gaps(_gap_bytes(3, 255, 255), 255, 338)),
    "gaps of a row too many": (_GAPS, _gaps(_gap_bytes(3, 255, 0, 0, 255), 255, 337)),
    "gaps of 2 GiB": ("`num_rows` against the inflated gaps", _gaps(lambda _: _zeros(1 << 31))),
    "an unused escape": (_ESCAPES, _gaps(_gap_bytes(3, 254, 0, 255), 255, 338)),
    "an escape too few": (_ESCAPES, _gaps(lambda data: data, 255)),
    "an escape too many": (_ESCAPES, _gaps(lambda data: data, 255, 338, 0)),
    "an escape below 255": ("the number is 255 or more", _gaps(lambda data: data, 254, 338)),
    "an escape of zero": ("the number is 255 or more", _gaps(lambda data: data, 0, 338)),
    "a negative escape": ("the number is 255 or more", _gaps(lambda data: data, -1, 338)),
    "an escape beyond the rows": (_IDS, _gaps(lambda data: data, 255, 339)),
    "an escape that overflows": (_IDS, _gaps(lambda data: data, 255, 2**63 - 1)),
    "two escapes whose sum wraps around": (_IDS, _gaps(lambda data: data, 2**63 - 1, 2**63 - 1)),
    "a BOOL of 2": (_BOOL, lambda tensors: tensors.update({"dense.1": Tensor("BOOL", (3,), b"\0\1\2")})),
    "a BOOL of 255": (_BOOL, lambda tensors: tensors.update({"dense.1": Tensor("BOOL", (3,), b"\xff\0\1")})),
}  # fmt: skip

_GOOD_PARTS: dict[str, tuple[str, Callable[[Stream], object]]] = {
    "tensors in another order": (
        "an order of the tensors in a part",
        lambda stream: stream.put_tensors(3, 0, dict(reversed(stream.tensors(3, 0).items()))),
    ),
    "a header in another order": (
        "an order of the tensors in a part",
        lambda stream: stream.put_part(
            3,
            0,
            _header_text(lambda text: _padded(json.dumps(dict(reversed(json.loads(text).items())))))(_data(stream)),
        ),
    ),
    "a header with more spaces": (
        "padded with spaces",
        lambda stream: stream.put_part(3, 0, _header_text(lambda text: text + " " * 64)(_data(stream))),
    ),
    "a header with escapes": (
        "the JSON header",
        lambda stream: stream.put_part(
            3,
            0,
            _header_text(
                lambda text: _padded(text.replace('"0.ids"', r'"0\u002eids"').replace("dtype", r"d\u0074ype"))
            )(_data(stream)),
        ),
    ),
    **{
        f"gaps of zlib level {level}": (_GAPS, _tensors(_gaps(lambda data, level=level: _raw(data, 15, level))))
        for level in (0, 1, 9)
    },
    "gaps of a small window": (_GAPS, _tensors(_gaps(lambda data: _raw(data, 9)))),
}


# Objects of format 2


def _sealed_body(change: Callable[[bytes], bytes]) -> Callable[[Stream], None]:
    """Return a change of the bytes before the digests; the digests stay, and so does the hash."""

    def edit(stream: Stream) -> None:
        data = _data(stream)
        stream.put_part(3, 0, change(data[:-16]) + data[-16:], is_sealed=False)

    return edit


def _sealed_digests(change: Callable[[bytes], bytes]) -> Callable[[Stream], None]:
    """Return a change of the digests, whose hash is in the record."""
    return lambda stream: stream.put_part(3, 0, _data(stream)[:-16] + change(_data(stream)[-16:]))


def _unlike_digests(change: Callable[[Tensors], Tensors]) -> Callable[[Stream], None]:
    """Return a change of the tensors with the digests, whose bytes match the file, but not the rule."""

    def edit(stream: Stream) -> None:
        data = file_of(change(tensors_of(_data(stream))))
        body = data[:-16]
        record = stream.entry(3)["parts"][0]
        data = body + page.digests_of(body)
        stream.objects[record["name"]] = data
        stream.edit(3, lambda entry: seal(entry["parts"][0], data))

    return edit


def _whole_hash(stream: Stream) -> None:
    """Record the hash of the whole object, as in format 1."""
    stream.edit(3, lambda entry: entry["parts"][0].update(xxh3=xxh3(_data(stream))))


_TWO_DIGESTS = Tensor("U8", (32,), bytes(32))
_BAD_OBJECTS: dict[str, tuple[str, Callable[[Stream], object]]] = {
    "a flipped bit of the header": (_DIGESTS, _sealed_body(_flip(9))),
    "a flipped bit of the data": (_DIGESTS, _sealed_body(_flip(-1))),
    "a flipped bit of the digests": (_DIGESTS, _sealed_digests(_flip(0))),
    "digests of zeros": (_DIGESTS, _sealed_digests(lambda _: bytes(16))),
    "digests in little-endian": (_DIGESTS, _sealed_digests(lambda digest: digest[::-1])),
    "a hash of the whole object": ("`xxh3` is the hash of the bytes from `body` on", _whole_hash),
    "no digests": (
        _LAST,
        _unlike_digests(lambda each: {name.replace("digests", "digest"): tensor for name, tensor in each.items()}),
    ),
    "digests of another dtype": (
        _LAST,
        _unlike_digests(lambda each: each | {"digests": Tensor("I8", (16,), bytes(16))}),
    ),
    "digests of another shape": (
        _LAST,
        _unlike_digests(lambda each: each | {"digests": Tensor("U8", (1, 16), bytes(16))}),
    ),
    "digests that are not the last tensor": (
        _LAST,
        _unlike_digests(lambda each: {"digests": each.pop("digests"), **each}),
    ),
    "a digest too many": (_LAST, _unlike_digests(lambda each: each | {"digests": _TWO_DIGESTS})),
}


def _large(change: Callable[[bytes], bytes], outcome: Outcome) -> Trial:
    """Return a trial with an object of two pieces of 8 MiB."""
    maker = Maker({"t": table_2(1 << 16, 34)})
    maker.claim()
    version = maker.snapshot()
    expected = maker.stream.expected(version) if outcome is Outcome.RIGHT else {}
    record = maker.stream.entry(version)["parts"][0]
    maker.stream.objects[record["name"]] = change(maker.stream.objects[record["name"]])
    return Trial(maker.stream, outcome, expected)


def _many(num_bytes: int, form: str) -> Trial:
    """Return a trial whose record has huge sizes, for an object of few bytes."""
    maker = plain_maker()
    blocks = [maker.block("t", [1, 3])]
    blocks[0].record["num_rows"] = num_bytes
    blocks[0].record["rows"] = [0, num_bytes]
    blocks[0].record["ids"] = form
    maker.tables["t"] = table(num_bytes, 4)
    maker.commit("delta", [Part(blocks)])
    return Trial(maker.stream, Outcome.REFUSED)


def _of_bytes(change: Callable[[bytes], bytes], *, is_sealed: bool) -> Callable[[Stream], None]:
    return lambda stream: stream.put_part(3, 0, change(_data(stream)), is_sealed=is_sealed)


def _missing(stream: Stream) -> None:
    del stream.objects[stream.entry(3)["parts"][0]["name"]]


def cases() -> Iterator[Case]:
    for make, number in ((plain, 1), (owned, 2)):
        for name, (rule, of_bytes) in _UNSEALED.items():
            trial = partial(_trial, make, _of_bytes(of_bytes, is_sealed=False))
            yield Run(f"part format {number} {name}", rule, trial)
        yield Run(f"part format {number} missing", "the parts of an entry exist", partial(_trial, make, _missing))
    for name, (rule, of_bytes) in _SEALED.items():
        yield Run(f"part sealed with {name}", rule, partial(_trial, plain, _of_bytes(of_bytes, is_sealed=True)))
    for name, (rule, of_header) in _BAD_HEADERS.items():
        yield Run(f"part header with {name}", rule, partial(_trial, plain, _header(of_header)))
    for name, (rule, of_tensors) in _BAD_TENSORS.items():
        yield Run(f"part with {name}", rule, partial(_trial, plain, _tensors(of_tensors)))
    for name, (rule, change) in _GOOD_PARTS.items():
        yield Run(f"part with {name}", rule, partial(_trial, plain, change, Outcome.RIGHT))
    for name, (rule, change) in _BAD_OBJECTS.items():
        yield Run(f"part format 2 with {name}", rule, partial(_trial, owned, change))
    yield from _sizes()


def _sizes() -> Iterator[Case]:
    yield Run("part format 2 of two pieces", _DIGESTS, partial(_large, lambda data: data, Outcome.RIGHT))
    for at in (20, 1 << 23, (1 << 23) - 1, -17, -1, -32):
        name = f"part format 2 of two pieces with a flipped bit at byte {at}"
        yield Run(name, _DIGESTS, partial(_large, _flip(at), Outcome.REFUSED))
    for num_rows in (2**31, 2**40, 2**61, 2**62):
        for form in ("list", "gaps", "all"):
            name = f"part of {num_rows} rows in the form {form}"
            yield Run(name, "Readers MUST check sizes before they allocate memory", partial(_many, num_rows, form))
