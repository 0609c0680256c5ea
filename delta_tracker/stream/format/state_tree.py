"""Encoding of the states of training objects as bytes, without pickle. ``stream/FORMAT.md`` specifies the encoding.

A state is a tree of ``None``, bool, int, float, str, bytes, list, tuple, dict with str or int keys, tensors and numpy
arrays. Its structure is JSON text. The bytes of its tensors, arrays and bytes objects follow the text.
"""

import math
import re
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Never, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.manifest import DENSE_DTYPES, MAX_DIMS
from delta_tracker.types import torch_dtype

MAX_TEXT_BYTES = 64 << 20
MAX_LEVELS = 64
"""Maximum depth of a state: number of values on the path from the root to a value, both included."""

_SIZE_BYTES = 8
_ALIGNMENT = 64
_CHUNK_BYTES = 8 << 20
_MAX_BYTES = 2**63 - 1
_MAX_SHOWN = 200
# The JSON text of a value, with the comma after it, has at least this many bytes.
_MIN_VALUE_BYTES = 3

TENSOR_DTYPES = {
    **{name: torch_dtype(each) for name, each in DENSE_DTYPES.items()},
    "C64": torch.complex64,
    "C128": torch.complex128,
}
_TENSOR_NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items()}
_ARRAY_DTYPES = {
    descr: np.dtype(descr)
    for descr in (
        *("|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8"),
        *("<f2", "<f4", "<f8", "<c8", "<c16"),
    )
}
_INT = re.compile(r"0|-?[1-9a-f][0-9a-f]*")
_FLOAT = re.compile(r"[0-9a-f]{16}")
_TOO_LONG = "Keep long lists in tensors: the structure exceeds 64 MiB"
_NO_TENSOR = (
    "Pass plain dense tensors. Of the optimizers, pass those of the dense parameters and of the tables whose optimizer "
    "is not fused"
)
_FREED = "Keep it allocated between batches: TrainPipelineSparseDistOptStash frees states before torchrec 1.8"
_PLAIN = "None, bool, int, float, str, bytes, list, tuple, dict, tensors and numpy arrays"


@dataclass(frozen=True, slots=True, eq=False)
class StateTree:
    """State with an encoded structure and with references to the original tensors, which are not copied.

    Args:
        text: JSON text of the structure.
        leaves: tensors, and bytes of other leaves, in the order of their data. The tensors share memory with the state.
        num_bytes: size of the encoded state in bytes.
    """

    text: bytes
    leaves: tuple[Tensor | bytes, ...]
    num_bytes: int

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among the leaves, in the order of the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def buffers(self, tensors: Sequence[Tensor]) -> Iterator[memoryview]:
        """Yield buffers whose concatenation is the encoded state.

        ``tensors`` are copies of :attr:`tensors` on the CPU, in the same order. The copies may have other shapes.
        """
        copies = iter(tensors)
        head = len(self.text).to_bytes(_SIZE_BYTES, "little") + self.text
        yield memoryview(head + bytes(_padding(len(head))))
        end = 0
        for leaf in self.leaves:
            if padding := _padding(end):
                yield memoryview(bytes(padding))
            data = memoryview(leaf) if isinstance(leaf, bytes) else _bytes_of(leaf, next(copies))
            end += padding + len(data)
            if len(data):
                yield data
        assert next(copies, None) is None, "one copy for each tensor"


def flatten(value: object, path: str, *, paths: Mapping[str, str] | None = None) -> StateTree:
    """Encode the structure of a state. Tensors are not copied, but numpy arrays are.

    Dicts of the types ``OrderedDict`` and ``defaultdict`` become dicts, and parameters become tensors. Subclasses of
    other types are rejected, because their type would be lost.

    Args:
        value: the state.
        path: name of the state in error messages.
        paths: if the state is a dict, the name of each value in error messages, by key; None to use ``path[key]``.

    Raises:
        InvalidArgumentError: if a value cannot be encoded. The error contains the path of the value, such as
            ``training_state['optimizer']['state'][3]['step']``.
    """
    flattener = _Flattener(path, paths or {})
    text = msgspec.json.encode(flattener.node(value))
    if len(text) > MAX_TEXT_BYTES:
        raise InvalidArgumentError(path, type(value), _TOO_LONG)
    num_bytes = _aligned(_SIZE_BYTES + len(text)) + flattener.end
    return StateTree(text, tuple(flattener.leaves), num_bytes)


def pack(value: object, path: str) -> bytes:
    """Encode the state ``value``, whose tensors must be on the CPU, as bytes. See :func:`flatten`."""
    tree = flatten(value, path)
    for tensor in tree.tensors:
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(path, tensor.device, "Keep the tensors of this state on the CPU")
    return b"".join(tree.buffers(tree.tensors))


def unpack(data: bytes | bytearray | memoryview | NDArray[np.uint8]) -> object:
    """Return the state that is encoded in ``data``. Raise ValueError if ``data`` is not an encoded state."""
    found = np.frombuffer(data, dtype=np.uint8)
    return StateReader(lambda begin, end: found[begin:end], len(found)).load()


class StateReader:
    """Reader of an encoded state, which may be untrusted. Reads only the data of the values that are loaded.

    The constructor decodes the text and checks each type, size and span, and the number of levels. This takes up to
    about 30 times the memory of the text.

    Args:
        read: function that takes ``begin`` and ``end``, and returns the bytes ``[begin, end)`` of the encoded state.
        num_bytes: size of the encoded state in bytes.

    Raises:
        ValueError: if the bytes are not an encoded state. Errors of ``read`` are raised too.
    """

    def __init__(self, read: Callable[[int, int], NDArray[np.uint8]], num_bytes: int) -> None:
        if num_bytes < _ALIGNMENT:
            raise ValueError(f"a state of {num_bytes} bytes")
        self._read = read
        length = int.from_bytes(read(0, _SIZE_BYTES).tobytes(), "little")
        if length > MAX_TEXT_BYTES:
            raise ValueError(f"a text of {length} bytes; the largest has {MAX_TEXT_BYTES}")
        self._start = _aligned(_SIZE_BYTES + length)
        if self._start > num_bytes:
            raise ValueError(f"a text of {length} bytes in a state of {num_bytes} bytes")
        head = read(_SIZE_BYTES, self._start).tobytes()
        if any(head[length:]):
            raise ValueError("bytes other than zeros after the text")
        parser = _Parser()
        self._root = parser.parse(_decoded(head[:length]), 1)
        if self._start + parser.end != num_bytes:
            raise ValueError(f"its data end at byte {self._start + parser.end} of {num_bytes}")

    def keys(self, *path: str) -> list[str]:
        """Return, in order, the keys of the dict at ``path``, a sequence of keys from the root.

        Raises:
            KeyError: if a key of the path is missing.
            ValueError: if the value is not a dict with only string keys.
        """
        found = self._find(path)
        if not isinstance(found, dict):
            raise ValueError(f"no dict at {list(path)}")  # noqa: TRY004  the data are not what is expected
        if not all(isinstance(key, str) for key in found):
            raise ValueError(f"keys other than strings at {list(path)}")
        return list(found)

    def load(self, *path: str) -> object:
        """Return the value at ``path``, a sequence of keys from the root. Tensors are copies on the CPU.

        Raises:
            KeyError: if a key of the path is missing.
            ValueError: if a value on the path is not a dict, or a bool tensor contains bytes other than 0 and 1.
        """
        return self._filled(self._find(path))

    def _find(self, path: Sequence[str]) -> object:
        found = self._root
        for number, key in enumerate(path):
            if not isinstance(found, dict):
                raise ValueError(f"no dict at {list(path[:number])}")  # noqa: TRY004
            if key not in found:
                raise KeyError(".".join(path[: number + 1]))
            found = found[key]
        return found

    def _filled(self, value: object) -> object:
        match value:
            case dict():
                return {key: self._filled(each) for key, each in value.items()}
            case list():
                return [self._filled(each) for each in value]
            case tuple():
                return tuple(self._filled(each) for each in value)
            case _Leaf():
                return self._leaf(value)
        return value

    def _leaf(self, leaf: "_Leaf") -> object:
        data = self._data(leaf.begin, leaf.end)
        if leaf.tag == "b":
            return data.numpy().tobytes()
        if leaf.dtype in ("BOOL", "|b1") and bool((data > 1).any()):
            raise ValueError("a bool tensor has bytes other than 0 and 1")
        if leaf.tag == "n":
            return data.numpy().view(_ARRAY_DTYPES[leaf.dtype]).reshape(leaf.shape)
        return data.view(TENSOR_DTYPES[leaf.dtype]).reshape(leaf.shape)

    def _data(self, begin: int, end: int) -> Tensor:
        """Return a copy of the bytes ``[begin, end)`` of the data. Unlike the result of ``read``, it is aligned."""
        data = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        for first in range(begin, end, _CHUNK_BYTES):
            last = min(first + _CHUNK_BYTES, end)
            data.numpy()[first - begin : last - begin] = self._read(self._start + first, self._start + last)
        return data


class _Flattener:
    """Encoder of one state. ``leaves`` are its tensors and bytes, and ``end`` is the number of bytes of the data."""

    def __init__(self, path: str, paths: Mapping[str, str]) -> None:
        self._path = path
        self._paths = paths
        self._keys: list[object] = []  # from the root to the current value
        self._num_values = 0
        self.leaves: list[Tensor | bytes] = []
        self.end = 0
        # By exact type: subclasses such as numpy.float64, IntEnum and torch.Size would lose their type.
        self._encoders: dict[type, Callable[[Any], object]] = {
            NoneType: _same,
            bool: _same,
            str: self._text,
            int: _int,
            float: lambda value: ["f", struct.pack(">d", value).hex()],
            bytes: self._bytes,
            list: self._items,
            tuple: self._items,
            dict: self._dict,
            OrderedDict: self._dict,
            defaultdict: self._dict,
            Tensor: self._tensor,
            nn.Parameter: self._tensor,
            np.ndarray: self._array,
        }

    def node(self, value: object) -> object:
        """Return the JSON value for ``value``."""
        self._num_values += 1
        if len(self._keys) >= MAX_LEVELS:
            self._refuse(value, f"Nest at most {MAX_LEVELS} values, without cycles")
        if self._num_values > MAX_TEXT_BYTES // _MIN_VALUE_BYTES:
            self._refuse(value, _TOO_LONG)
        encode = self._encoders.get(type(value))
        if encode is None:
            self._refuse(value, _NO_TENSOR if isinstance(value, Tensor) else f"Convert it: a state has {_PLAIN}")
        return encode(value)

    def _below(self, key: object, value: object) -> object:
        self._keys.append(key)
        node = self.node(value)
        self._keys.pop()
        return node

    def _items(self, value: list[object] | tuple[object, ...]) -> list[object]:
        items = [self._below(key, each) for key, each in enumerate(value)]
        return ["l" if type(value) is list else "u", items]

    def _dict(self, value: dict[object, object]) -> list[object]:
        return ["d", [[self._key(value, key), self._below(key, each)] for key, each in value.items()]]

    def _key(self, holder: object, key: object) -> object:
        if type(key) is str:
            return self._text(key)
        if type(key) is not int:
            self._refuse(holder, f"Use keys of the types str and int, not {type(key).__name__}")
        return _int(key)

    def _text(self, value: str) -> str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                self._refuse(value, "Remove surrogates from the string, which UTF-8 cannot encode")
        return value

    def _bytes(self, value: bytes) -> list[object]:
        return ["b", *self._span(value, len(value))]

    def _tensor(self, value: Tensor) -> list[object]:
        if value.layout != torch.strided or value.is_nested or value.is_meta:
            self._refuse(value, _NO_TENSOR)
        if value.numel() and not value.untyped_storage().nbytes():  # reading it would fail on the device
            self._refuse(value, _FREED)
        if value.dtype not in _TENSOR_NAMES or not _fits(value.shape, value.itemsize):
            self._refuse(value, f"Convert it: tensors {list(value.shape)} of {value.dtype} are not encoded")
        # Conjugate and negative views have the memory of other values.
        live = value.detach().resolve_conj().resolve_neg()
        return ["t", _TENSOR_NAMES[value.dtype], list(value.shape), *self._span(live, live.nbytes)]

    def _array(self, value: NDArray[Any]) -> list[object]:
        dtype = value.dtype.newbyteorder("<")
        if dtype.str not in _ARRAY_DTYPES or not _fits(value.shape, dtype.itemsize):
            self._refuse(value, f"Convert it: arrays {list(value.shape)} of {value.dtype} are not encoded")
        copied = np.asarray(value, dtype=dtype, order="C").tobytes()
        return ["n", dtype.str, list(value.shape), *self._span(copied, len(copied))]

    def _span(self, leaf: Tensor | bytes, num_bytes: int) -> tuple[int, int]:
        begin = _aligned(self.end)
        self.end = begin + num_bytes
        self.leaves.append(leaf)
        return begin, self.end

    def _refuse(self, value: object, remedy: str) -> Never:
        keys, path = self._keys, self._path
        if keys and keys[0] in self._paths:
            keys, path = keys[1:], self._paths[cast("str", keys[0])]
        path += "".join(f"[{_shown(key)}]" for key in keys)
        raise InvalidArgumentError(path, type(value), remedy)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Bytes, tensor or array whose data have not been read, described by its tag in the text, dtype, shape and span."""

    tag: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


class _Parser:
    """Parser of the decoded text of an untrusted state. ``end`` is the number of bytes of the data."""

    def __init__(self) -> None:
        self.end = 0

    def parse(self, node: object, level: int) -> object:
        """Return the value that ``node`` encodes, with leaves in place of data. Raise ValueError if it is invalid."""
        if level > MAX_LEVELS:
            raise ValueError(f"more than {MAX_LEVELS} levels")
        found: object = node
        match node:
            case None | bool() | str():
                pass
            case ["i" | "f" as tag, str(text)]:
                found = _number(tag, text)
            case ["l", list(items)]:
                found = [self.parse(each, level + 1) for each in items]
            case ["u", list(items)]:
                found = tuple(self.parse(each, level + 1) for each in items)
            case ["d", list(pairs)]:
                found = self._dict(pairs, level)
            case ["b", begin, end]:
                found = self._leaf("b", "", [], begin, end, None)
            case ["t", str(dtype), list(shape), begin, end] if dtype in TENSOR_DTYPES:
                found = self._leaf("t", dtype, shape, begin, end, TENSOR_DTYPES[dtype].itemsize)
            case ["n", str(dtype), list(shape), begin, end] if dtype in _ARRAY_DTYPES:
                found = self._leaf("n", dtype, shape, begin, end, _ARRAY_DTYPES[dtype].itemsize)
            case _:
                raise ValueError(f"an invalid value of the JSON type {type(node).__name__}")
        return found

    def _dict(self, pairs: list[object], level: int) -> dict[object, object]:
        found: dict[object, object] = {}
        for pair in pairs:
            match pair:
                case [str(key), value]:
                    name: object = key
                case [["i", str(text)], value]:
                    name = _number("i", text)
                case _:
                    raise ValueError("an item of a dict is not a pair of a string or an integer and a value")
            if name in found:
                raise ValueError("two keys of a dict are equal")
            found[name] = self.parse(value, level + 1)
        return found

    def _leaf(self, tag: str, dtype: str, shape: list[Any], begin: object, end: object, itemsize: int | None) -> _Leaf:
        if type(begin) is not int or type(end) is not int or begin != _aligned(self.end) or end < begin:
            raise ValueError(f"an invalid span after byte {self.end} of the data")
        if itemsize is not None and end - begin != _num_bytes(shape, itemsize):
            raise ValueError(f"a span of {end - begin} bytes for a tensor {shape}")
        self.end = end
        return _Leaf(tag, dtype, shape, begin, end)


def _number(tag: str, text: str) -> object:
    if not (_INT if tag == "i" else _FLOAT).fullmatch(text):
        raise ValueError("an invalid integer or float")
    return int(text, 16) if tag == "i" else struct.unpack(">d", bytes.fromhex(text))[0]


def _num_bytes(shape: list[Any], itemsize: int) -> int:
    """Return the size of a tensor in bytes. Raise ValueError if the shape is invalid."""
    sizes = [size for size in shape if type(size) is int and 0 <= size <= _MAX_BYTES]
    if len(sizes) < len(shape) or not _fits(sizes, itemsize):
        raise ValueError("an invalid shape")
    return itemsize * math.prod(sizes)


def _fits(shape: Sequence[int], itemsize: int) -> bool:
    """Return True if a tensor of this shape can be created. Torch and numpy reject empty tensors with huge strides."""
    return len(shape) <= MAX_DIMS and math.prod(max(1, size) for size in shape) * itemsize <= _MAX_BYTES


def _decoded(text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(f"more than {MAX_LEVELS} levels") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"its text is not JSON: {error}") from error


def _shown(key: object) -> str:
    if isinstance(key, int) and key.bit_length() > _MAX_SHOWN:
        return f"<{key.bit_length()} bits>"
    return repr(key)[:_MAX_SHOWN]


def _same(value: object) -> object:
    return value


def _int(value: int) -> list[str]:
    return ["i", format(value, "x")]


def _aligned(position: int) -> int:
    return position + _padding(position)


def _padding(position: int) -> int:
    return -position % _ALIGNMENT


def _bytes_of(leaf: Tensor, copied: Tensor) -> memoryview:
    assert (copied.dtype, copied.numel()) == (leaf.dtype, leaf.numel()), "a copy of the tensor"
    if not leaf.nbytes:  # the strides of an empty tensor do not suit all dtypes
        return memoryview(b"")
    return copied.contiguous().view(-1).view(torch.uint8).numpy().data
