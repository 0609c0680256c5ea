from __future__ import annotations

import enum
import json
import math
import pickle
import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format import state_tree
from delta_tracker.stream.format.state_tree import StateReader, flatten, pack, unpack

_SHAPES = st.lists(st.integers(0, 3), max_size=4)


def _filled(dtype: np.dtype[Any], shape: list[int], seed: int) -> np.ndarray[Any, Any]:
    """Return an array whose bytes are 0 and 1, which are valid for every dtype."""
    data = np.random.default_rng(seed).integers(0, 2, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return data.view(dtype).reshape(shape)


def _tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    data = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
    return data.random_(0, 2, generator=torch.Generator().manual_seed(seed)).view(dtype).reshape(shape)


_TENSORS = st.builds(_tensor, st.sampled_from([*state_tree.TENSOR_DTYPES.values()]), _SHAPES, st.integers(0, 99))
_ARRAYS = st.builds(_filled, st.sampled_from([*state_tree._ARRAY_DTYPES.values()]), _SHAPES, st.integers(0, 99))
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.binary(max_size=70)
    | _TENSORS
    | _ARRAYS
)
_STATES = st.recursive(
    _LEAVES,
    lambda below: (
        st.lists(below, max_size=4)
        | st.lists(below, max_size=4).map(tuple)
        | st.dictionaries(st.text("ab1", max_size=2) | st.integers(-2, 2), below, max_size=4)
    ),
    max_leaves=12,
)


def _bits(value: Any) -> Any:
    """Return a value that is equal exactly for states of the same types and bits."""
    kind = type(value)
    if isinstance(value, Tensor):
        raw = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return Tensor, value.dtype, tuple(value.shape), raw
    if kind is np.ndarray:
        return kind, value.dtype.str, value.shape, value.tobytes()
    if kind is float:
        return kind, struct.pack("d", value)
    if kind in (list, tuple):
        return kind, [_bits(each) for each in value]
    if kind is dict:
        return kind, [(type(key), key, _bits(each)) for key, each in value.items()]
    return kind, value


def _encoded(root: Any, data: bytes = b"") -> bytes:
    """Return a state with this text, as bytes or as a JSON value, and these data."""
    text = root if isinstance(root, bytes) else json.dumps(root).encode()
    head = len(text).to_bytes(8, "little") + text
    return head + bytes(-len(head) % 64) + data


@settings(deadline=None, max_examples=80)
@given(_STATES)
def test_a_state_is_decoded_as_it_was(state: Any) -> None:
    packed = pack(state, "state")
    assert flatten(state, "state").num_bytes == len(packed)
    assert _bits(unpack(packed)) == _bits(state)


def test_numbers_and_strings() -> None:
    floats = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324]
    state = [0, -1, 10**5000, -(2**64), *floats, "", "a\0\n\u2028", "\U0001f600", {10**5000: 1}]
    assert _bits(unpack(pack(state, "state"))) == _bits(state)


def test_states_of_random_generators() -> None:
    state = {"torch": torch.get_rng_state(), "random": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002
    assert _bits(unpack(pack(state, "state"))) == _bits(state)


def test_dicts_and_parameters_lose_their_class_only() -> None:
    state = [OrderedDict(b=1, a=2), defaultdict(list, {3: [4]}), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(1))]
    ordered, default, parameter, buffer = unpack(pack(state, "state"))  # type: ignore[misc]
    assert (type(ordered), list(ordered.items())) == (dict, [("b", 1), ("a", 2)])
    assert (type(default), default) == (dict, {3: [4]})
    assert type(parameter) is type(buffer) is Tensor
    assert not parameter.requires_grad


def test_views_are_encoded_with_their_values() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    complex_ = torch.tensor([1 + 2j, 3 - 4j])
    state = [tensor.T, tensor[:, ::2], torch.ones(1).expand(5), complex_.conj(), complex_.conj().imag, torch.tensor(7)]
    found = unpack(pack(state, "state"))
    assert isinstance(found, list)
    assert all(torch.equal(each, expected) for each, expected in zip(found, state, strict=True))


def test_arrays_of_other_byte_orders_and_strides() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    found = unpack(pack([array, array.T[::-1], np.array(5)], "state"))
    assert isinstance(found, list)
    assert found[0].dtype.str == "<i4"
    assert all(np.array_equal(each, expected) for each, expected in zip(found, [array, array.T[::-1], 5], strict=True))
    assert all(each.flags.writeable for each in found)


class _Point(namedtuple("_Point", "x y")):  # noqa: PYI024
    __slots__ = ()


class _Subclass(Tensor):
    pass


class _Loads:
    """Object that would run code if it were pickled and unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise AssertionError("it was pickled")


def _cycle() -> list[object]:
    cycle: list[object] = []
    cycle.append(cycle)
    return cycle


def _nested(levels: int) -> Any:
    state: Any = None
    for _ in range(levels - 1):
        state = [state]
    return state


_REFUSED: dict[str, Callable[[], Any]] = {
    "numpy float": lambda: np.float64(1.0),
    "numpy int": lambda: np.int64(1),
    "numpy bool": lambda: np.bool_(True),
    "numpy string": lambda: np.str_("a"),
    "enum": lambda: enum.IntEnum("_E", "A").A,  # type: ignore[attr-defined]
    "string enum": lambda: enum.StrEnum("_S", "A").A,  # type: ignore[attr-defined]
    "named tuple": lambda: _Point(1, 2),
    "size": lambda: torch.Size([1]),
    "counter": lambda: Counter("a"),
    "set": lambda: {1},
    "bytearray": lambda: bytearray(b"a"),
    "complex": lambda: 1j,
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("cpu"),
    "function": lambda: len,
    "object": _Loads,
    "generator": torch.Generator,
    "iterator": lambda: iter([]),
    "bool key": lambda: {True: 1},
    "None key": lambda: {None: 1},
    "float key": lambda: {1.0: 1},
    "tuple key": lambda: {(1,): 1},
    "numpy key": lambda: {np.int64(1): 1},
    "surrogate": lambda: "\ud800",
    "surrogate key": lambda: {"\udfff": 1},
    "object array": lambda: np.array([object()]),
    "datetimes": lambda: np.array(["2020"], dtype="M8[Y]"),
    "string array": lambda: np.array(["a"]),
    "records": lambda: np.zeros(1, dtype=[("a", "i4")]),
    "long doubles": lambda: np.zeros(1, dtype=np.longdouble),
    "masked array": lambda: np.ma.zeros(1),
    "matrix": lambda: np.zeros((1, 1)).view(np.matrix),
    "subclass": lambda: torch.ones(1).as_subclass(_Subclass),
    "uninitialized": nn.UninitializedParameter,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.empty(2, device="meta"),
    "float8": lambda: torch.zeros(1).to(torch.float8_e4m3fn),
    "uint16": lambda: torch.zeros(1, dtype=torch.uint16),
    "half complex": lambda: torch.zeros(1, dtype=torch.int32).view(torch.complex32),
    "many dimensions": lambda: torch.zeros([1] * 17),
    "too large and empty": lambda: torch.empty((2**61, 0)),
    "cycle": _cycle,
    "deep": lambda: _nested(63),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_other_values_are_refused_by_their_path(kind: str) -> None:
    value = _REFUSED[kind]()
    with pytest.raises(InvalidArgumentError) as raised:
        flatten({"opt": {"state": [0, {3: value}]}}, "training_state")
    assert raised.value.argument.startswith("training_state['opt']['state'][1][3]")
    assert kind in ("cycle", "deep") or raised.value.argument == "training_state['opt']['state'][1][3]"


def test_paths_of_long_keys() -> None:
    with pytest.raises(InvalidArgumentError, match="16610 bits") as raised:
        flatten({"a" * 10_000: {10**5000: {1}}}, "state")
    assert len(raised.value.argument) < 300


def test_quantized_and_nested_tensors_are_refused() -> None:
    with pytest.warns(UserWarning, match="."):
        values = [
            torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
            torch.nested.nested_tensor([torch.ones(1)]),
        ]
    for value in values:
        with pytest.raises(InvalidArgumentError, match=r"^state\['a'\]="):
            flatten({"a": value}, "state")


def test_tensors_whose_memory_was_freed_are_refused() -> None:
    freed, empty = torch.ones(3), torch.ones(0)
    freed.untyped_storage().resize_(0)
    with pytest.raises(InvalidArgumentError, match=r"^training_state\['a'\]\['exp_avg'\]=.*torchrec 1.8"):
        flatten({"training": {"a": {"empty": empty, "exp_avg": freed}}}, "state", paths={"training": "training_state"})


def test_the_values_of_the_root_have_paths_of_their_own() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^rank_state\['a'\]="):
        flatten({"rank": {"a": {1}}}, "state", paths={"rank": "rank_state"})


def test_as_many_levels_as_are_read() -> None:
    assert unpack(pack(_nested(64), "state")) == _nested(64)
    with pytest.raises(InvalidArgumentError, match="64"):
        pack(_nested(65), "state")


def test_a_structure_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_tree, "MAX_TEXT_BYTES", 40)
    assert unpack(pack("a" * 38, "state")) == "a" * 38
    for state in ("a" * 39, [None] * 14):
        with pytest.raises(InvalidArgumentError, match="64 MiB"):
            pack(state, "state")
    with pytest.raises(ValueError, match="41 bytes"):
        unpack(_encoded(b" " * 41))


def test_tensors_are_copied_by_the_caller() -> None:
    live = torch.tensor([1.0, 2.0])
    tree = flatten({"a": live, "b": b"xy", "c": torch.tensor(3)}, "state")
    live += 1  # after the structure was encoded, before the copy
    found = unpack(b"".join(tree.buffers([tree.tensors[0].clone(), tree.tensors[1].clone().view(1)])))
    assert isinstance(found, dict)
    assert (found["a"].tolist(), found["b"], found["c"].item(), found["c"].shape) == ([2.0, 3.0], b"xy", 3, ())


def test_arrays_are_copied_at_once() -> None:
    array = np.ones(2)
    tree = flatten(array, "state")
    array += 1
    assert np.array_equal(unpack(b"".join(tree.buffers([]))), np.ones(2))  # type: ignore[arg-type]


def test_packed_tensors_are_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(state_tree.StateTree, "tensors", [remote])
    with pytest.raises(InvalidArgumentError, match="on the CPU"):
        pack([torch.ones(1)], "loader")


def test_empty_tensors_of_any_strides() -> None:
    empty = torch.from_numpy(np.empty(0, dtype=np.int64))  # its stride is 0
    found = unpack(pack([empty, torch.empty(3, 0, 2), np.empty((0, 2))], "state"))
    assert isinstance(found, list)
    assert [tuple(each.shape) for each in found] == [(0,), (3, 0, 2), (0, 2)]


# Reading


def _reader(data: bytes, reads: list[tuple[int, int]] | None = None) -> StateReader:
    found = np.frombuffer(data, dtype=np.uint8)

    def read(begin: int, end: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert 0 <= begin <= end <= len(found)
        if reads is not None:
            reads.append((begin, end))
        return found[begin:end]

    return StateReader(read, len(data))


def test_only_the_loaded_values_are_read() -> None:
    state = {"big": torch.ones(1000), "rank": {"a": torch.ones(3), "b": b"x" * 100}, "data": None}
    reads: list[tuple[int, int]] = []
    reader = _reader(pack(state, "state"), reads)
    assert reader.keys() == ["big", "rank", "data"]
    assert reader.keys("rank") == ["a", "b"]
    assert reader.load("data") is None
    text = len(reads)
    assert torch.equal(reader.load("rank", "a"), torch.ones(3))  # type: ignore[arg-type]
    assert [end - begin for begin, end in reads[text:]] == [12]
    assert reader.load("rank", "b") == b"x" * 100
    assert [end - begin for begin, end in reads[text:]] == [12, 100]
    with pytest.raises(KeyError, match=r"rank\.c"):
        reader.load("rank", "c", "d")
    with pytest.raises(ValueError, match="no dict"):
        reader.load("big", "c")
    with pytest.raises(ValueError, match="no dict"):
        reader.keys("data")


def test_keys_other_than_strings_are_not_left_out() -> None:
    reader = _reader(pack({"a": {1: 2}}, "state"))
    assert reader.load("a") == {1: 2}
    with pytest.raises(ValueError, match="other than strings"):
        reader.keys("a")


def test_large_values_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_tree, "_CHUNK_BYTES", 10)
    state = [torch.arange(9), b"abcdefghijklmno", np.arange(3)]
    reads: list[tuple[int, int]] = []
    assert _bits(_reader(pack(state, "state"), reads).load()) == _bits(state)
    assert max(end - begin for begin, end in reads[3:]) == 10


def test_loaded_tensors_share_no_memory_with_the_source() -> None:
    data = bytearray(pack([torch.ones(4), np.ones(2)], "state"))
    tensor, array = unpack(data)  # type: ignore[misc]
    data[:] = bytes(len(data))
    assert (tensor.tolist(), array.tolist()) == ([1.0] * 4, [1.0] * 2)


_DATA = bytes(range(64)) * 2
_VALID: dict[str, Any] = {"null": None, "bytes": ["b", 0, 128], "tensor": ["t", "F32", [32], 0, 128]}
_INVALID: dict[str, Any] = {
    "number": 1,
    "fraction": 1.5,
    "object": {},
    "empty array": [],
    "array of numbers": [1, 2],
    "unknown tag": ["x", 1],
    "tag of a list": [["i"], "1"],
    "int without value": ["i"],
    "int with two values": ["i", "1", "2"],
    "int as number": ["i", 1],
    "int in capitals": ["i", "A"],
    "int with a zero": ["i", "01"],
    "int with a prefix": ["i", "0x1"],
    "int with an underscore": ["i", "1_0"],
    "int with a space": ["i", "1 "],
    "int with a newline": ["i", "1\n"],
    "negative zero": ["i", "-0"],
    "no digits": ["i", ""],
    "float as number": ["f", 1.0],
    "short float": ["f", "3ff"],
    "long float": ["f", "3ff00000000000000"],
    "list of two": ["l", [], []],
    "list in a string": ["l", "ab"],
    "dict as object": ["d", {"a": 1}],
    "dict of values": ["d", ["a"]],
    "dict of triples": ["d", [["a", None, None]]],
    "number as key": ["d", [[1, None]]],
    "None as key": ["d", [[None, None]]],
    "bytes as key": ["d", [[["b", 0, 0], None]]],
    "float as key": ["d", [[["f", "0000000000000000"], None]]],
    "equal keys": ["d", [["a", None], ["a", None]]],
    "equal int keys": ["d", [[["i", "a"], None], [["i", "a"], None]]],
    "invalid int key": ["d", [[["i", "0a"], None]]],
    "bytes without end": ["b", 0],
    "span in floats": ["b", 0.0, 128.0],
    "span in bools": ["b", False, 128],
    "negative span": ["b", 128, 0],
    "span before the data": ["b", -64, 128],
    "span after the data": ["b", 0, 192],
    "span ends early": ["b", 0, 127],
    "span begins late": ["b", 64, 128],
    "spans overlap": ["l", [["b", 0, 128], ["b", 64, 128]]],
    "spans are equal": ["l", [["b", 0, 128], ["b", 0, 128]]],
    "spans are not aligned": ["l", [["b", 0, 1], ["b", 1, 128]]],
    "a span is missing": ["l", [["b", 0, 1], ["b", 128, 128]]],
    "unknown dtype": ["t", "F8", [128], 0, 128],
    "dtype in a list": ["t", ["U8"], [128], 0, 128],
    "shape too large": ["t", "F32", [33], 0, 128],
    "shape too small": ["t", "F32", [31], 0, 128],
    "shape in floats": ["t", "F32", [32.0], 0, 128],
    "shape in bools": ["t", "U8", [True, 128], 0, 128],
    "negative shape": ["t", "F32", [-4, -8], 0, 128],
    "17 dimensions": ["t", "F32", [1] * 16 + [32], 0, 128],
    "shape overflows": ["t", "U8", [2**62, 4, 0], 0, 0],
    "huge shape": ["t", "U8", [2**63], 0, 2**63],
    "tensor without shape": ["t", "U8", 0, 128],
    "object array": ["n", "|O", [16], 0, 128],
    "big-endian array": ["n", ">i4", [32], 0, 128],
    "array of text": ["n", "<U1", [32], 0, 128],
    "array in numpy's words": ["n", "float32", [32], 0, 128],
    "65 levels": json.loads('["l",[' * 64 + "null" + "]]" * 64),
}


@pytest.mark.parametrize("kind", _VALID)
def test_a_state_that_is_written_by_hand(kind: str) -> None:
    unpack(_encoded(_VALID[kind], b"" if kind == "null" else _DATA))


@pytest.mark.parametrize("kind", _INVALID)
def test_invalid_texts_are_refused_before_the_data_are_read(kind: str) -> None:
    data = _encoded(_INVALID[kind], b"" if kind == "shape overflows" else _DATA)
    reads: list[tuple[int, int]] = []
    with pytest.raises(ValueError):  # noqa: PT011
        _reader(data, reads)
    assert reads == [(0, 8), (8, data.index(_DATA) if _DATA in data else len(data))]


@pytest.mark.parametrize(
    "text",
    [b"", b"[", b'"', b'"\\ud800"', b'"\xff"', b"null null", b"NaN", b"9" * 5000, b"[" * 100_000, b"\xef\xbb\xbfnull"],
    ids=lambda text: repr(text[:10]),
)
def test_texts_that_are_not_json_are_refused(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(_encoded(text))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(63),
        bytes(64),
        (2**63).to_bytes(8, "little") + bytes(56),
        ((64 << 20) + 1).to_bytes(8, "little") + bytes(64 << 10),
        (57).to_bytes(8, "little") + b" " * 52 + b"null",
        (4).to_bytes(8, "little") + b"null" + bytes(51) + b"\1",
        _encoded(None, bytes(64)),
        _encoded(["t", "BOOL", [2], 0, 2], b"\1\2"),
        _encoded(["n", "|b1", [2], 0, 2], b"\1\2"),
    ],
    ids=["empty", "short", "no text", "huge text", "long text", "cut", "padding", "data", "bool", "bool array"],
)
def test_invalid_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(data)


_SAMPLE = pack({"a": [1, -2.5, None, torch.arange(5)], 3: (b"xyz", np.arange(2, dtype=bool), "s"), "b": {}}, "state")


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, len(_SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=3),
    st.integers(0, len(_SAMPLE)) | st.just(len(_SAMPLE)),
)
def test_damaged_bytes_are_refused_or_another_state(changes: list[tuple[int, int]], length: int) -> None:
    damaged = bytearray(_SAMPLE)
    for place, value in changes:
        damaged[place] = value
    try:
        state = unpack(damaged[:length])
    except ValueError:
        return
    assert _bits(unpack(pack(state, "state"))) == _bits(state)


def test_nothing_is_unpickled() -> None:
    hostile = b"cbuiltins\nexit\n."
    assert unpack(pack(hostile, "state")) == hostile
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(pickle.dumps({"a": 1}) + bytes(64))
