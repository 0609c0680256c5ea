"""Random streams, the state of a reader after each of their versions, and readers that must reach those states."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from delta_tracker.errors import CorruptPartError
from delta_tracker.stream import log as log_module
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.codec import encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, DenseSpec, Manifest, Merged, Part
from delta_tracker.stream.format.part_reader import read_parts
from delta_tracker.stream.format.part_writer import put_part
from delta_tracker.stream.log import StreamLog, part_name
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.stores.rules import Dated, Killed
from tests.stores.wrapped import Operation, Perform, WrappedStorage
from tests.stream.streams import chunks_of

State = dict[str, Tensor]

_TABLES = {
    "a": TableSpec("a", 12, 4, torch.float32),
    "b": TableSpec("b", 7, 8, torch.bfloat16),
    "c": TableSpec("c", 5, 2, torch.float32),
}
# The models in tests/predictor/serving.py lack this table; the random choices for the others do not depend on it.
_UNKNOWN = TableSpec("unknown", 3, 2, torch.float32)
_SPECS = _TABLES | {"unknown": _UNKNOWN}
_COLUMNS = {
    "a": [[(0, 4)], [(0, 2), (2, 4)]],
    "b": [[(0, 8)], [(0, 4), (4, 8)], [(0, 2), (2, 8)]],
    "c": [[(0, 2)]],
}
_DENSE = {"w": torch.float32, "x": torch.int64}


class Clock:
    """Clock of publishers, retention and the store; tests advance it."""

    def __init__(self) -> None:
        self.seconds = 1e6

    def __call__(self) -> float:
        return self.seconds

    @contextlib.contextmanager
    def of_the_log(self, ahead: float = 0.0) -> Iterator[None]:
        """Context manager in which the clock of publishers is this many seconds ahead of the store's."""
        with mock.patch.object(log_module, "time", SimpleNamespace(time=lambda: self.seconds + ahead)):
            yield


def clocked(clock: Clock, resolution: float = 0.0) -> WrappedStorage:
    """Return a store in memory that dates its objects by a clock, whose resolution is in seconds."""
    return WrappedStorage(Storage("memory://"), Dated(clock, resolution))


def dies(operation: Operation, perform: Perform) -> Any:
    """Rule that kills the publisher right after it has created an object."""
    answer = perform(operation)
    if operation.kind == "create" and answer:
        raise Killed
    return answer


def apply(state: State, storage: Storage, manifest: Manifest) -> State:
    """Return a reader's state after a version: the slow reference."""
    if manifest.kind == "claim":
        return state
    after = {name: tensor for name, tensor in state.items() if name in manifest.tables or name.startswith("dense ")}
    for fqn, spec in manifest.tables.items():
        after[fqn] = state[fqn].clone() if fqn in state else torch.zeros(spec.num_rows, spec.dim, dtype=spec.dtype)
    readers = read_parts(storage, manifest)
    for is_whole in (True, False):
        for reader in readers:
            for rows in reader.rows:
                block, decoded = rows.block, rows.decoded(after[rows.block.table].dtype)
                for ids, values in chunks_of(decoded, 3) if (block.ids == "all") == is_whole else ():
                    for row, value in zip(ids, values, strict=True):
                        after[block.table][row, slice(*block.columns)] = value
    for reader in readers:
        after |= {f"dense {name}": tensor.clone() for name, tensor in reader.dense().items()}
    return after


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


class History:
    """Successive publishers of a stream; ``states`` maps each version to the state of a reader after it."""

    def __init__(self, storage: Storage, seed: int) -> None:
        self.storage, self.log = storage, StreamLog(storage)
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.states: dict[int, State] = {}
        self.state: State = {}
        self.fqns = ["a", "b"]
        self.unreadable: set[str] = set()  # names that readers can never read
        self.claim()
        self.snapshot()

    def fork(self) -> History:
        """Return the same publisher in another process, which sees none of the later changes."""
        sleeper = copy.copy(self)
        sleeper.held, sleeper.states, sleeper.state = copy.copy(self.held), dict(self.states), dict(self.state)
        return sleeper

    @property
    def version(self) -> int:
        return self.held.head.version

    def claim(self) -> None:
        """Claim with a new publisher, with another sharding and other encodings, and sometimes another table."""
        head = self.log.head()
        # Readers may reach the claim before it returns.
        self.states[0 if head is None else head.version + 1] = self.state
        self.held = self.log.claim()
        choose = self.random.choice
        if choose([True, False, False]) or "unknown" in self.fqns:
            self.fqns = choose([["a", "b"], ["a", "b", "c"], ["a"]])
        self.cuts = {
            fqn: sorted({0, self.random.randrange(spec.num_rows), spec.num_rows}) for fqn, spec in _TABLES.items()
        } | {"unknown": [0, 3]}
        self._choose_layout()

    def delta(self, num_rows: int | None = None) -> None:
        dense = [name for name in _DENSE if self.random.random() < 0.3]
        self._commit("delta", [self._rows(num_rows=num_rows)], dense)

    def snapshot(self, *, is_fuzzy: bool = False) -> None:
        parts = [self._rows(is_whole=True)]
        if is_fuzzy:
            parts.append(self._rows())
            if self.random.random() < 0.3:  # closing rows of another shape
                columns, encodings = self.columns, self.encodings
                self._choose_layout()
                parts[1] = self._rows()
                self.columns, self.encodings = columns, encodings
            if self.random.random() < 0.3:
                parts = [parts[0] + parts[1]]
        self._commit("snapshot", parts, list(_DENSE))

    def _choose_layout(self) -> None:
        self.columns = {fqn: self.random.choice(each) for fqn, each in _COLUMNS.items()} | {"unknown": [(0, 2)]}
        self.encodings = {fqn: self._encoding(spec) for fqn, spec in _TABLES.items()} | {"unknown": Encoding.F32}

    def _encoding(self, spec: TableSpec) -> Encoding:
        return self.random.choice([Encoding.of(spec.dtype)] * 2 + list(Encoding))

    def _rows(self, *, is_whole: bool = False, num_rows: int | None = None) -> list[BlockRows]:
        rows = []
        for fqn in self.fqns:
            encoding = self.encodings[fqn]
            for first, end in zip(self.cuts[fqn], self.cuts[fqn][1:], strict=False):
                for columns in self.columns[fqn]:
                    count = end - first if is_whole else min(end - first, num_rows or self.random.randrange(6))
                    ids = torch.tensor(sorted(self.random.sample(range(first, end), count)), dtype=torch.int64)
                    form = "all" if is_whole else "gaps" if encoding.is_quantized else "list"
                    block = Block(fqn, (first, end), columns, count, form, encoding)
                    values = torch.randn(count, block.num_columns, generator=self.torch).to(_SPECS[fqn].dtype)
                    rows.append(BlockRows.of(block, None if is_whole else ids, encode_rows(values, encoding)))
        return rows

    def _commit(self, kind, groups: list[list[BlockRows]], names: list[str]) -> None:
        head = self.held.head
        dense = {name: torch.randn(3, generator=self.torch).mul(9).to(_DENSE[name]) for name in names}
        parts: list[Part] = []
        for number, rows in enumerate(groups):
            name = part_name(head.version + 1, head.generation, f"r{number}")
            parts.append(put_part(self.storage, name, rows, dense if number == 0 else {}, states_name=None))
        draft = Manifest(
            stream="",
            generation=0,
            writer="",
            version=0,
            kind=kind,
            created=0.0,
            batches=(head.version, head.version + 1),
            pending_rows=self.random.randrange(3),
            tables={fqn: _SPECS[fqn] for fqn in self.fqns},
            dense={name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in dense.items()},
            parts=tuple(parts),
        )
        # Readers may reach the version before the commit returns.
        state = apply(self.state, self.storage, replace(draft, version=head.version + 1))
        self.state = self.states[head.version + 1] = state
        assert self.held.commit(draft).version in self.states


class Reader:
    """Reader of a stream, whose state at each version must equal the history's."""

    def __init__(self, history: History, seed: int = 0) -> None:
        self.history, self.log = history, StreamLog(history.storage)
        self.random = random.Random(seed)
        self.held: Manifest | None = None
        self.state: State = {}
        self.resyncs = self.jumps = 0

    def sync(self, limit: int = 1 << 30) -> None:
        while limit > 0 and self.step():
            limit -= 1

    def step(self) -> bool:
        """Apply one version or restart from a snapshot; return False at the head."""
        manifest = self._next()
        if manifest is None:
            if self.held is None or self.log.versions()[-1] == self.held.version:
                return False
            if self._following(self.held.version) is None:  # removed, not just committed
                self._resync()
            return True
        try:
            state = apply(self.state, self.log.storage, manifest)
        except CorruptPartError:
            there = (
                self.log.read(manifest.version)
                if manifest.merges is None
                else self.log.read_merged(Merged.of(manifest))
            )
            # Another compaction may have made a merged entry of the same name with other parts.
            is_kept = manifest.merges is None and self.log.precedes_claim(manifest)  # without its parts
            assert is_kept or there is None or there.xxh3 != manifest.xxh3, "a part went before its entry"
            self._resync()
            return True
        self.state, self.held = state, manifest
        self.jumps += manifest.merges is not None
        assert_equal(state, self.history.states[manifest.version])
        return True

    def _next(self) -> Manifest | None:
        if self.held is None:
            return self.log.newest_snapshot()
        version = self.held.version
        if self.random.random() < 0.5:
            return self.log.longest_merged(version) or self._following(version)
        return self._following(version) or self.log.longest_merged(version)

    def _following(self, version: int) -> Manifest | None:
        manifest = self.log.read(version + 1)
        assert manifest is None or manifest.parent == self.held.link
        is_late = manifest is not None and manifest.kind == "claim" and not self.log.is_committed(manifest)
        return None if is_late else manifest

    def _resync(self) -> None:
        self.held, self.state = None, {}
        self.resyncs += 1
