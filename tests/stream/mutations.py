"""Mutations of JSON and of parts, each drawn from a separate generator."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

_T = TypeVar("_T")
_RAW = "\x01raw:"  # a string that is written without quotes
_HUGE = "9" * 5000  # more digits than Python reads
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31, 2**32, 2**53, 2**61, 2**62, 2**63 - 1, 2**63, 2**64, 10**400,
    0.0, 1.0, -0.5, 1e308, "", "x", "0", "F32", "F16", "INT4", "INT8", "list", "gaps", "all", "snapshot", "claim", "U8",
    "BOOL", "I64", {"dtype": "I64", "hash_size": 0, "buckets": [{"rows": [0, 12], "default": None}]},
    "../../etc/passwd", "parts/x.safetensors", "/", "\x00", "\u00e9\ud800", "\U0001f600" * 50, "a" * 10_000, "0" * 32,
    [], {}, [[]], [{}], [0, 0], [0, 1], [1, 0], [0, 2**62], [0, -1], [None], {"version": 0, "xxh3": "0" * 32},
    {"": {}}, list(range(20)), _RAW + "NaN", _RAW + "Infinity", _RAW + "-Infinity", _RAW + _HUGE, _RAW + "-" + _HUGE,
    _RAW + "1e999", _RAW + "1E2", _RAW + "-0", _RAW + "[" * 3000, _RAW + "[" * 300 + "]" * 300,
    _RAW + '{"a":' * 200 + "1",
]  # fmt: skip


_QUOTED_RAW = re.compile(rf'"{re.escape(json.dumps(_RAW)[1:-1])}(?:[^"\\\\]|\\\\.)*"')


class Draw:
    """Random decisions and choices."""

    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self.below = generator.randrange
        self.between = generator.randint

    def chance(self, probability: float) -> bool:
        return self._generator.random() < probability

    def choice(self, values: Sequence[_T]) -> _T:
        return values[self._generator.randrange(len(values))]


def mutate_entry(draw: Draw, data: bytes) -> bytes:
    """Mutate a JSON text: its values, its bytes, or both."""
    data = mutate_json(draw, data) if draw.chance(0.75) else mutate_bytes(draw, data)
    return mutate_bytes(draw, data) if draw.chance(0.05) else data


def mutate_json(draw: Draw, data: bytes) -> bytes:
    tree = json.loads(data)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        tree = _mutate_tree(draw, tree)
    text = json.dumps(tree, separators=(",", ":") if draw.chance(0.8) else None, ensure_ascii=draw.chance(0.7))
    text = _QUOTED_RAW.sub(lambda found: json.loads(found[0]).removeprefix(_RAW), text)
    if draw.chance(0.05) and text.startswith("{"):
        text = '{"' + draw.choice(["version", "parts", "tables", "x"]) + '":0,' + text[1:]
    return text.encode(errors="surrogatepass")


def mutate_bytes(draw: Draw, data: bytes) -> bytes:
    mutant = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.below(len(mutant) + 1)
        length = draw.choice([1, 1, 2, 8, 50])
        piece = bytes(mutant[at : at + length])
        kind = draw.below(7)
        if kind == 0:
            mutant[at : at + length] = b""
        elif kind == 1:
            mutant[at:at] = piece * draw.choice([1, 2, 20])
        elif kind == 2:
            del mutant[at:]
        elif kind == 3:
            mutant[at : at + length] = bytes(draw.below(256) for _ in piece)
        elif kind == 4:
            mutant[at : at + 1] = bytes([draw.choice(b'0123456789{}[]",:.-+aeEntf \\\xff\x00')])
        elif kind == 5 and piece:
            mutant[at] ^= 1 << draw.below(8)
        else:
            other = draw.below(len(mutant) + 1)
            mutant[other : other + length] = piece
    return bytes(mutant)


def mutate_part(draw: Draw, data: bytes) -> bytes:
    """Mutate a part: its header, ids, gaps, or any bytes."""
    kind = draw.below(5)
    if kind < 2:
        return mutate_part_bytes(draw, data, kind)
    if kind == 2:
        size = draw.choice(
            [0, 1, 7, 8, 2**16, 2**31, 2**40, 2**63, 2**64 - 1, len(data), len(data) - 8, len(data) - 16]
        )
        return size.to_bytes(8, "little") + data[8:]
    tensors = _tensors(data)
    for _ in range(draw.choice([1, 1, 2])):
        _mutate_tensor(draw, tensors)
    return _built(tensors)


def mutate_object(draw: Draw, data: bytes, digests_of: Callable[[bytes], bytes]) -> tuple[bytes, int]:
    """Mutate an object of format 2, and seal it with the digests of its new bytes.

    Returns:
        The object, and the size of its body.
    """
    kind = draw.below(5)
    tensors = _tensors(data)
    sealed = bytes(tensors.pop("digests")[2])
    if kind < 2:
        body = mutate_part_bytes(draw, data[: len(data) - len(sealed)], kind) or b"\0"  # a body is not empty
        return body + digests_of(body), len(body)
    for _ in range(draw.choice([1, 1, 2])):
        _mutate_tensor(draw, tensors)
    number = 1
    while True:
        size = len(digests_of(bytes(number)))
        built = _built({**tensors, "digests": ["U8", [size], bytes(size)]})
        body = built[: len(built) - size]
        digests = digests_of(body)
        if len(digests) == size:
            return body + digests, len(body)
        number = len(body)


def mutate_part_bytes(draw: Draw, data: bytes, kind: int) -> bytes:
    """Mutate the bytes of a part, or its header."""
    if kind == 0:
        return mutate_bytes(draw, data)
    return _with_header(data, lambda head: mutate_entry(draw, head), is_padded=draw.chance(0.9))


def _mutate_tree_bytes(draw: Draw, raw: bytes) -> bytes:
    """Mutate an encoded training state: its text, or any bytes."""
    length = int.from_bytes(raw[:8], "little")
    if draw.chance(0.2) or length > len(raw):
        return mutate_bytes(draw, raw)
    try:
        text = mutate_entry(draw, raw[8 : 8 + length])
    except ValueError:  # mutated before
        return mutate_bytes(draw, raw)
    head = len(text).to_bytes(8, "little") + text
    return head + bytes(-len(head) % 64) + raw[8 + length + -(8 + length) % 64 :]


def _mutate_tensor(draw: Draw, tensors: dict[str, list[Any]]) -> None:
    """Change a tensor's length, ids or gaps; the file stays well-formed."""
    told = [name for name in tensors if name.rpartition(".")[2] in ("ids", "gaps", "escapes", "owners")]
    if not tensors:
        return
    name = draw.choice(told) if told and draw.chance(0.85) else draw.choice(list(tensors))
    dtype, shape, raw = tensors[name]
    if name == "state" and draw.chance(0.95):
        raw = _mutate_tree_bytes(draw, raw)
        tensors[name] = [dtype, [len(raw)], raw]
    elif name.endswith(".gaps"):
        raw = _mutate_gaps(draw, raw)
        tensors[name] = [dtype, [len(raw)], raw]
    elif dtype == "I64" and len(shape) == 1:
        ids = _mutate_ids(draw, np.frombuffer(raw, np.int64).tolist())
        tensors[name] = [dtype, [len(ids)] if draw.chance(0.9) else shape, np.array(ids, np.int64).tobytes()]
    elif draw.chance(0.7) and raw:
        at = draw.below(len(raw))
        tensors[name] = [dtype, shape, raw[:at] + bytes([draw.below(256)]) + raw[at + 1 :]]
    elif draw.chance(0.5):
        del tensors[name]
    else:
        tensors[draw.choice(["x", "0.ids", "dense.0", "__metadata__"])] = [dtype, shape, raw]


def _mutate_ids(draw: Draw, ids: list[int]) -> list[int]:
    at = draw.below(len(ids) + 1)
    number = draw.choice([-1, 0, 1, 254, 255, 256, 5, 599, 600, 2**31, 2**62, 2**63 - 1, -(2**63)])
    if draw.chance(0.3) and at < len(ids):
        number = max(-(2**63), min(2**63 - 1, ids[at] + draw.choice([-1, 1, 2])))
    if draw.chance(0.2):
        ids.insert(at, number)
    elif draw.chance(0.15):
        del ids[at : at + 1]
    elif draw.chance(0.2):
        ids.reverse()
    else:
        ids[at : at + 1] = [number]
    if draw.chance(0.2) and ids:
        ids[draw.below(len(ids))] = ids[draw.below(len(ids))]
    return ids


def _mutate_gaps(draw: Draw, raw: bytes) -> bytes:
    simple: list[Callable[[], bytes]] = [
        lambda: mutate_bytes(draw, raw),
        lambda: raw + bytes(draw.between(1, 9)),
        lambda: _zeros(draw.choice([0, 1, 1000, 1_000_000, 50_000_000])),  # a bomb at its largest
        lambda: raw[: draw.below(len(raw) + 1)],
        lambda: raw + raw,
    ]
    if draw.chance(0.7):
        return draw.choice(simple)()
    try:
        gaps = bytearray(zlib.decompress(raw))
    except zlib.error:  # mutated before
        return mutate_bytes(draw, raw)
    at = draw.below(len(gaps) + 1)
    gaps[at : at + 1] = draw.choice([b"", b"\x00", b"\xff", b"\xfe", b"\x00\x00", b"\xff\xff", b"\x05"])
    return zlib.compress(bytes(gaps), draw.below(10) if len(gaps) < 10_000 else 9)


def _tensors(data: bytes) -> dict[str, list[Any]]:
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {
        name: [
            entry["dtype"],
            entry["shape"],
            data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        ]
        for name, entry in header.items()
    }


def _built(tensors: dict[str, list[Any]]) -> bytes:
    header, begin = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(raw)]}
        begin += len(raw)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + b"".join(raw for _, _, raw in tensors.values())


def _with_header(data: bytes, edit: Callable[[bytes], bytes], *, is_padded: bool) -> bytes:
    end = 8 + int.from_bytes(data[:8], "little")
    head = edit(data[8:end])
    head += b" " * (-len(head) % 8 if is_padded else 0)
    return len(head).to_bytes(8, "little") + head + data[end:]


def _mutate_tree(draw: Draw, tree: Any) -> Any:
    """Change one value, often a deep one."""
    if isinstance(tree, dict | list) and tree and draw.chance(0.93):
        keys: list[Any] = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = draw.choice(keys)
        kind = draw.below(20)
        if kind == 0:
            del tree[key]
        elif kind == 1 and isinstance(tree, list):
            tree.insert(draw.below(len(tree) + 1), copy.deepcopy(tree[key]))
        elif kind == 1:
            tree[draw.choice(["x", "", "t", "whole", "0.ids", "\ud83d"])] = tree.pop(key)
        elif kind == 2 and isinstance(tree, list):
            tree.reverse()
        elif kind == 2:
            tree[key] = copy.deepcopy(tree[draw.choice(keys)])
        else:
            tree[key] = _mutate_tree(draw, tree[key])
        return tree
    if type(tree) is int and draw.chance(0.6):
        return draw.choice(
            [tree + 1, tree - 1, tree * 2, -tree, tree + 8, _as_float(tree), str(tree), tree << 40, [tree]]
        )
    if isinstance(tree, str) and draw.chance(0.4):
        return draw.choice([tree + "x", tree[:-1], tree.upper(), tree + "\n", [tree], tree[::-1], tree + "/.."])
    return copy.deepcopy(draw.choice(_VALUES))


def _as_float(number: int) -> float:
    return float(max(-(2**70), min(2**70, number)))


@functools.cache
def _zeros(num_bytes: int) -> bytes:
    return zlib.compress(bytes(num_bytes))
