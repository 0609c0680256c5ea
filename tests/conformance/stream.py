"""A stream in memory, which a case edits before it writes it to a directory, and the tensors that a reader must return.

No code of the library is used: the cases must hold for readers in every language.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from tests.stream.golden import reader as page

NO_OWNER = (1 << 63) - 1
GOLDEN = Path(page.__file__).parent

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a safetensors file: its dtype as in the file, its shape, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray[Any, Any], dtype: str) -> Tensor:
        """Convert an array; one of float32 is cut to its upper bits for BF16."""
        if dtype == "BF16":
            return cls(dtype, array.shape, (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes())
        return cls(dtype, array.shape, array.astype(page.DTYPES[dtype]).tobytes())

    def is_same(self, other: Tensor) -> bool:
        """Return True if all bits are equal; every NaN equals every other one."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        if self.data == other.data:
            return True
        mine, others = (page.array_of(each.data, each.dtype) for each in (self, other))
        return mine.dtype.kind == "f" and len(mine) == len(others) and _same_numbers(mine, others)


Tensors = dict[str, Tensor]


def _same_numbers(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    nan = np.isnan(one)
    return bool((nan == np.isnan(other)).all()) and one[~nan].tobytes() == other[~nan].tobytes()


def tensors_of(data: bytes) -> Tensors:
    """Return the tensors of a safetensors file."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)  # allowed in outputs, not in parts
    return {
        name: Tensor(each["dtype"], tuple(each["shape"]), data[slice(*(start + at for at in each["data_offsets"]))])
        for name, each in header.items()
    }


def file_of(tensors: Mapping[str, Tensor], edit: Callable[[dict[str, Any]], object] | None = None) -> bytes:
    """Return a safetensors file; ``edit`` changes its header in place."""
    header: dict[str, Any] = {}
    begin = 0
    for name, each in tensors.items():
        header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [begin, begin + len(each.data)]}
        begin += len(each.data)
    if edit is not None:
        edit(header)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + b"".join(each.data for each in tensors.values())


def xxh3(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def entry_name(version: int) -> str:
    return f"log/{version:020d}.json"


def merged_name(last: int, first: int, kind: str) -> str:
    return f"merged/{last:020d}-{first:020d}-{kind}.json"


def to_bytes(entry: Entry) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode()


@dataclass
class Stream:
    """The objects of a stream by name."""

    objects: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def load(cls, root: Path) -> Self:
        return cls({path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()})

    def copy(self) -> Self:
        return type(self)(dict(self.objects))

    def write(self, root: Path) -> None:
        for name, data in self.objects.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)

    # Entries

    @property
    def versions(self) -> list[int]:
        """The versions of the log, ascending."""
        return sorted(int(name[4:24]) for name in self.objects if name.startswith("log/"))

    def entry(self, name: int | str) -> Entry:
        """Return the entry of a version, or the merged entry of a name."""
        found: Entry = json.loads(self.objects[entry_name(name) if isinstance(name, int) else name])
        return found

    def link(self, version: int) -> dict[str, Any]:
        return {"version": version, "xxh3": xxh3(self.objects[entry_name(version)])}

    def put_entry(self, name: int | str, entry: Entry | bytes) -> None:
        """Replace an entry, and link the entries of the log above it again."""
        key = entry_name(name) if isinstance(name, int) else name
        self.objects[key] = entry if isinstance(entry, bytes) else to_bytes(entry)
        for version in self.versions:
            if isinstance(name, int) and version > name and version - 1 in self.versions:
                following = self.entry(version)
                following["parent"] = self.link(version - 1)
                self.objects[entry_name(version)] = to_bytes(following)

    def edit(self, name: int | str, change: Callable[[Entry], object]) -> None:
        """Change an entry in place."""
        entry = copy.deepcopy(self.entry(name))
        change(entry)
        self.put_entry(name, entry)

    def remove(self, *prefixes: str) -> None:
        """Remove the objects whose names begin so."""
        self.objects = {name: data for name, data in self.objects.items() if not name.startswith(prefixes)}

    def truncate(self, version: int) -> Self:
        """Return the stream up to a version, without merged entries of later ones."""
        found = self.copy()
        for name in self.objects:
            if name.startswith(("log/", "merged/")) and int(name.partition("/")[2][:20]) > version:
                del found.objects[name]
        return found

    # Parts

    def put_part(self, name: int | str, index: int, data: bytes, *, is_sealed: bool = True) -> None:
        """Replace a part; ``is_sealed`` also sets its new size and hash (and the digests of format 2) in its record."""
        entry = self.entry(name)
        part = entry["parts"][index]
        if is_sealed and entry["format"] == 2:
            seal(part, data)
        elif is_sealed:
            part |= {"num_bytes": len(data), "xxh3": xxh3(data)}
        self.objects[part["name"]] = data
        if is_sealed:
            self.put_entry(name, entry)

    def tensors(self, name: int | str, index: int) -> Tensors:
        """Return the tensors of a part, without its digests."""
        found = tensors_of(self.objects[self.entry(name)["parts"][index]["name"]])
        found.pop("digests", None)
        return found

    def put_tensors(self, name: int | str, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Replace the tensors of a part, and set its new size, hash and digests."""
        data = file_with_digests(tensors) if self.entry(name)["format"] == 2 else file_of(tensors)
        self.put_part(name, index, data)

    # What a reader must return

    @property
    def dense_names(self) -> frozenset[str]:
        """Names of the dense tensors of all entries of the log that are JSON."""
        found: set[str] = set()
        for version in self.versions:
            with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
                found |= self.entry(version)["dense"].keys()
        return frozenset(found)

    def state(self, version: int) -> page.State:
        """Return the state after a version, applied entry by entry from the newest snapshot in the log."""
        return self._applied(self._path(version))

    def _applied(self, path: Sequence[Entry]) -> page.State:
        state: page.State = {}
        for entry in path:
            if entry["kind"] != "claim":
                with np.errstate(all="ignore"):
                    page.apply(_Root(self.objects), entry, state)
        return state

    def expected(self, version: int, raw_ids: Mapping[str, Sequence[int]] | None = None) -> Tensors:
        """Return the tensors that a reader writes after a version."""
        return self._output(self._path(version), raw_ids)

    def expected_by(self, merged: str, version: int) -> Tensors:
        """Return the tensors that a reader writes after a version if it applies a merged entry on the way."""
        last, first, kind = merged.removeprefix("merged/").removesuffix(".json").split("-")
        before = [] if kind == "snapshot" else self._path(int(first) - 1)
        return self._output([*before, self.entry(merged), *map(self.entry, range(int(last) + 1, version + 1))], None)

    def _output(self, path: Sequence[Entry], raw_ids: Mapping[str, Sequence[int]] | None) -> Tensors:
        tables: dict[str, Any] = {}
        dtypes: dict[str, str] = {}
        for entry in path:
            tables |= entry["tables"]
            dtypes |= {name: each["dtype"] for name, each in (entry["tables"] | entry["dense"]).items()}
        state, found = self._applied(path), Tensors()
        for name, array in state.items():
            fqn = name.removesuffix("/owners")
            found[name if fqn == name else f"{fqn}.owners"] = Tensor.of(array, dtypes.get(name, "I64"))
        for fqn, asked in (raw_ids or {}).items():
            rows = [page.row_of(tables[fqn]["identity"], state[f"{fqn}/owners"], each) for each in asked]
            found[f"{fqn}.answers"] = Tensor.of(np.array([-1 if row is None else row for row in rows], "<i8"), "I64")
        return found

    def _path(self, version: int) -> list[Entry]:
        """Return the entries from the newest snapshot in the log up to a version."""
        path = [self.entry(version)]
        while path[0]["kind"] != "snapshot":
            version -= 1
            path.insert(0, self.entry(version))
        return path


@dataclass(frozen=True)
class _Root:
    """Objects in memory in place of the directory that the second reader reads."""

    objects: Mapping[str, bytes]
    name: str = ""

    def __truediv__(self, name: str) -> _Root:
        return _Root(self.objects, name)

    def read_bytes(self) -> bytes:
        return self.objects[self.name]


def seal(record: dict[str, Any], data: bytes) -> None:
    """Set the size, the body and the hash of an object of format 2 that ends with its digests."""
    num_pieces = -(-len(data) // ((1 << 23) + 16))
    body = len(data) - 16 * num_pieces
    record |= {"num_bytes": len(data), "body": body, "xxh3": xxh3(data[body:])}


def file_with_digests(tensors: Mapping[str, Tensor], edit: Callable[[dict[str, Any]], object] | None = None) -> bytes:
    """Return an object of format 2: a safetensors file that ends with its digests."""
    size = 16
    while True:
        data = file_of({**tensors, "digests": Tensor("U8", (size,), bytes(size))}, edit)
        digests = page.digests_of(data[:-size])
        if len(digests) == size:
            return data[:-size] + digests
        size = len(digests)
