"""Mutated manifests and parts: ``python -m tests.stream.fuzz_stream --mutations 100000 --seed 0``.

Each mutation of the frozen stream, and of a stream of format 2, must be refused with a typed error, or give the same
result as a second reader of the same bytes. Other exceptions, a changed table after an error, a hang, and memory out of
proportion to the file's size are failures. Mutation ``n`` of a seed does not depend on the others: ``--only n`` repeats
it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import CorruptPartError, MalformedError, StreamError
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.recovery.recovery_path import recovery_path
from delta_tracker.stream.format import digests as digests_module
from delta_tracker.stream.format import part_reader as part_module
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.manifest import Manifest, Part, Stored, entry_name
from delta_tracker.stream.format.object_reader import Ranged
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.format.part_reader import PartReader, read_training
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.stream import states_stream
from tests.stream.golden import reader as page
from tests.stream.mutations import Draw, mutate_bytes, mutate_entry, mutate_object, mutate_part
from tests.stream.states_stream import same_tree
from tests.stream.streams import chunks_of

_STREAM = Path(__file__).parent / "golden" / "format-1" / "stream"
_SECONDS = 60  # per mutation, which takes a millisecond
# Memory that a reader may use per byte of a file: parsed JSON takes some 20 times its text, ids 8 bytes per packed one.
TIMES_FILE, AND_BYTES = 40, 1 << 20
_ADDRESS_SPACE = 512 << 20  # in addition to what the imported libraries have mapped
_PIECE_BYTES = 64


class _Hang(BaseException):
    """A mutation took too long."""


class Fuzzer:
    """A stream, its mutations, and checks of their results.

    Args:
        stream: directory of the stream.
        seed: seed of all mutations.
    """

    def __init__(self, stream: Path, seed: int) -> None:
        self._seed = seed
        names = [path.relative_to(stream).as_posix() for path in sorted(stream.rglob("*.json"))]
        self._entries = {name: (stream / name).read_bytes() for name in names}
        self._manifests = {name: parse_manifest(name, data) for name, data in self._entries.items()}
        self._objects = {
            stored.name: (stream / stored.name).read_bytes()
            for each in self._manifests.values()
            for stored in each.objects
        }
        self._storage = Storage("memory://")
        for name, data in self._objects.items():
            self._storage.put(name, [memoryview(data)])
        self._root = Path(tempfile.mkdtemp(prefix="fuzz-"))
        shutil.copytree(stream, self._root, dirs_exist_ok=True)
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.largest = 0.0  # peak memory as a multiple of the file's size

    def close(self) -> None:
        shutil.rmtree(self._root)

    def run(self, number: int) -> None:
        """Run one mutation.

        Raises:
            AssertionError: if a result is neither a typed error nor correct.
        """
        draw = Draw(random.Random(f"{self._seed}/{number}"))
        name = draw.choice(list(self._manifests))
        if draw.chance(0.5) or not self._manifests[name].parts:
            self._run_manifest(draw, name)
        elif self._manifests[name].format == 1:
            self._run_part(draw, name)
        else:
            self._run_object(draw, name)

    def _run_manifest(self, draw: Draw, name: str) -> None:
        data = mutate_entry(draw, self._entries[name])
        with self._bounded(len(data)):
            try:
                manifest = parse_manifest(name, data)
            except MalformedError as error:
                self._check_text(error)
                manifest = None
        if draw.chance(0.1):
            self._sync(draw, name, data, manifest)
            self._recover(name, data)
        if manifest is None:
            self.outcomes["manifest refused"] += 1
            return
        assert parse_manifest(name, manifest.to_json()) == manifest
        whole = [self._read(manifest, part, self._objects) for part in manifest.parts]
        whole += [self._read_training(stored, self._objects) for stored in manifest.training]
        self.outcomes["manifest right, parts " + ("right" if all(whole) else "refused")] += 1

    def _run_part(self, draw: Draw, name: str) -> None:
        manifest = self._manifests[name]
        part = draw.choice(manifest.parts)
        data = mutate_part(draw, self._objects[part.name])
        changed = part
        if draw.chance(0.9):
            changed = replace(part, num_bytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))
        manifest = replace(manifest, parts=tuple(changed if each is part else each for each in manifest.parts))
        with self._stored(part.name, data) as objects:
            is_right = self._read(manifest, changed, objects)
            assert not is_right or changed is not part or data == self._objects[part.name]
            if draw.chance(0.1):
                entry = manifest.to_json()
                self._sync(draw, name, entry, parse_manifest(name, entry))
        self.outcomes["part " + ("right" if is_right else "refused")] += 1

    def _run_object(self, draw: Draw, name: str) -> None:
        """Mutate an object of format 2: a part, its states, or a training state."""
        manifest = self._manifests[name]
        stored = draw.choice(manifest.objects)
        changed = stored
        if draw.chance(0.8):
            data, body = mutate_object(draw, self._objects[stored.name], page.digests_of)
            digest = xxhash.xxh3_128_hexdigest(data[body:])
            changed = replace(stored, num_bytes=len(data), body=body, xxh3=digest)
        else:
            data = mutate_bytes(draw, self._objects[stored.name])
            if draw.chance(0.5):  # digests of other bytes
                changed = replace(stored, xxh3=xxhash.xxh3_128_hexdigest(data[stored.body :]))
        with self._stored(stored.name, data) as objects:
            if isinstance(changed, Stored) and stored in manifest.training:
                is_right, kind = self._read_training(changed, objects), "training state"
            else:
                kind = "part" if isinstance(changed, Part) else "states"
                part = next(each for each in manifest.parts if stored in (each, each.states))
                new = changed if isinstance(changed, Part) else replace(part, states=changed)
                manifest = replace(manifest, parts=tuple(new if each is part else each for each in manifest.parts))
                is_right = self._read(manifest, new, objects)
                if draw.chance(0.1):
                    entry = manifest.to_json()
                    with suppress(MalformedError):  # a body of another size
                        self._sync(draw, name, entry, parse_manifest(name, entry))
                    self._recover(name, entry)
            record = {"num_bytes": changed.num_bytes, "body": changed.body, "xxh3": changed.xxh3}
            assert not is_right or page.is_right(data, record)
        self.outcomes[f"{kind} of format 2 " + ("right" if is_right else "refused")] += 1

    @contextmanager
    def _stored(self, name: str, data: bytes) -> Iterator[Mapping[str, bytes]]:
        """Replace an object for a time. Yields all objects."""
        self._storage.put(name, [memoryview(data)])
        (self._root / name).write_bytes(data)
        try:
            yield {**self._objects, name: data}
        finally:
            self._storage.put(name, [memoryview(self._objects[name])])
            (self._root / name).write_bytes(self._objects[name])

    def _read(self, manifest: Manifest, part: Part, objects: Mapping[str, bytes]) -> bool:
        """Read a part in memory, in pieces and in ranges; return True if all are correct, False if all refuse it."""
        data = objects.get(part.name, b"")
        states = b"" if part.states is None else objects.get(part.states.name, b"")
        found = []
        for mode in ("memory", "pieces", "ranges") if part.body else ("memory", "pieces"):
            with self._bounded(len(data) + len(states)):
                try:
                    reader, rows = _opened(self._storage, manifest, part, mode)
                except CorruptPartError as error:
                    self._check_text(error)
                    found.append(False)
                    continue
            _check(reader, rows, data, states)
            found.append(True)
        assert len(set(found)) == 1, f"memory, pieces and ranges differ: {found}"
        return found[0]

    def _read_training(self, stored: Stored, objects: Mapping[str, bytes]) -> bool:
        data = objects.get(stored.name, b"")
        with self._bounded(len(data)):
            try:
                tree = read_training(self._storage, stored).load()
            except CorruptPartError as error:
                self._check_text(error)
                return False
            except ValueError as error:
                if "bool" not in str(error):  # the only values that are checked when they are read
                    raise
                return False
        assert same_tree(page.training_of(data), tree), "decoded wrongly"
        return True

    def _check_text(self, error: CorruptPartError | MalformedError) -> None:
        assert len(str(error)) < 3000
        self.reasons[re.sub(r"[^a-z ]+", "*", error.reason)[:60]] += 1

    def _sync(self, draw: Draw, name: str, data: bytes, manifest: Manifest | None) -> None:
        """Sync a predictor at the version before this entry, or a new one, to the mutated entry."""
        version = self._manifests[name].version
        if name != entry_name(version):
            return
        storage = Storage("memory://")
        for part in {part.name for each in self._manifests.values() for part in each.parts}:  # no states
            storage.put(part, [memoryview((self._root / part).read_bytes())])
        for before in range(version):
            storage.create(entry_name(before), self._entries[entry_name(before)])
        specs = next(each.tables for each in self._manifests.values() if each.tables)
        tables = {fqn: torch.full((each.num_rows, each.dim), -1.0, dtype=each.dtype) for fqn, each in specs.items()}
        identities = next(each.identities for each in self._manifests.values() if each.tables)
        indexes = {fqn: RawIdIndex(identity.num_rows) for fqn, identity in identities.items()}
        predictor = Predictor(ModelTarget(tables, dense=False, raw_ids=indexes), storage)
        if version > 1 and draw.chance(0.8):
            # Earlier parts are not mutated: each version has its own.
            predictor.sync()
        held = _held(tables, indexes)
        at, start = predictor.version, predictor.manifest
        storage.create(entry_name(version), data)
        with mock.patch.object(part_module, "MEMORY_BYTES", draw.choice([0, 1 << 20])):
            try:
                predictor.sync()
            except StreamError:
                if predictor.version == at:  # otherwise the snapshot before it was correctly applied first
                    assert predictor.manifest is start
                    now = _held(tables, indexes)
                    assert all(torch.equal(now[key], each) for key, each in held.items()), "half applied"
                self.outcomes["sync refused"] += 1
                return
        assert manifest is not None, "what does not parse was applied"
        state = {fqn: table.numpy().copy() for fqn, table in held.items()}
        first = 0 if at is None else version
        if at is None and manifest.kind != "snapshot":
            first = manifest.snapshot or 0
        for each in range(first, version + 1):
            entry = data if each == version else self._entries[entry_name(each)]
            page.apply(self._root, json.loads(entry), state)
        for key, found in _held(tables, indexes).items():
            assert np.array_equal(found.numpy(), state[key], equal_nan=True), f"applied wrongly: {key}"
        self.outcomes["sync right"] += 1

    def _recover(self, name: str, data: bytes) -> None:
        """Read what a restore reads, from the snapshot before this entry on."""
        version = self._manifests[name].version
        if self._manifests[name].format == 1:
            return
        storage = Storage("memory://")
        for stored in self._objects:
            storage.put(stored, [memoryview((self._root / stored).read_bytes())])
        entries = {each: self._entries[entry_name(each)] for each in range(version)} | {version: data}
        for number, entry in entries.items():
            storage.create(entry_name(number), entry)
        found: dict[str, torch.Tensor] = {}
        try:
            path = recovery_path(StreamLog(storage))
            if path[0].tables != states_stream.TABLES:
                return
            for manifest in path:
                states_stream.apply(storage, manifest, found)
            for stored in path[-1].training:
                read_training(storage, stored)
        except StreamError:
            self.outcomes["recovery refused"] += 1
            return
        expected: dict[str, np.ndarray[Any, Any]] = {}
        for manifest in path:
            entry = json.loads(entries[manifest.version])
            page.apply(self._root, entry, expected)
            page.apply_states(self._root, entry, expected)
        for key, each in found.items():
            values = expected[key].astype(each.numpy().dtype)
            assert np.array_equal(each.numpy(), values, equal_nan=not key.endswith("/owners")), f"recovered: {key}"
        self.outcomes["recovery right"] += 1

    @contextmanager
    def _bounded(self, num_bytes: int) -> Iterator[None]:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        yield
        taken = tracemalloc.get_traced_memory()[1] - before
        assert taken <= TIMES_FILE * num_bytes + AND_BYTES, f"{taken} bytes for a file of {num_bytes}"
        self.largest = max(self.largest, taken / max(num_bytes, 1024))


def _held(tables: Mapping[str, torch.Tensor], indexes: Mapping[str, RawIdIndex]) -> dict[str, torch.Tensor]:
    """Return copies of the tables by name, and of the raw ids of their rows by ``table/owners``."""
    owners = {f"{fqn}/owners": index.owners() for fqn, index in indexes.items()}
    return {fqn: table.clone() for fqn, table in tables.items()} | owners


def _opened(storage: Storage, manifest: Manifest, part: Part, mode: str) -> tuple[PartReader, list[BlockRows]]:
    """Open a part and its states; in ranges, also read everything, because only what is read is checked."""
    if mode != "ranges":
        reader = PartReader(storage, part, manifest, memory_bytes=1 << 30 if mode == "memory" else 0)
        return reader, reader.with_states()
    # Raw ids are checked only if all blocks are read.
    blocks = None if manifest.identities else range(len(part.blocks))
    reader = PartReader(storage, part, manifest, source=Ranged(storage, part), blocks=blocks)
    rows = reader.with_states(None if part.states is None else Ranged(storage, part.states))
    for each in rows:
        for read in (each.read, *each.states):
            for _ in each.chunks(5, read=read):
                pass
    reader.dense()
    return reader, rows


def _check(reader: PartReader, rows: list[BlockRows], data: bytes, states: bytes) -> None:
    """Check that every block, state and tensor equals what the second reader finds in the same bytes."""
    found = page.tensors_of(states) if states and reader.part.states is not None else {}
    for index, each in enumerate(rows):
        for number, read in enumerate(each.states):
            stored = read(0, each.block.num_rows)
            assert _numpy(stored).tobytes() == found[f"{index}.states.{number}"].tobytes()
    tensors = page.tensors_of(data)
    for index, block in enumerate(reader.part.blocks):
        chunks = list(chunks_of(reader.rows[index], 5))
        ids = [row for listed, _ in chunks for row in listed]
        plain = {"ids": str(block.ids), "rows": block.rows}
        assert ids == page.ids_of(index, plain, tensors)
        assert ids == sorted(set(ids))
        assert not ids or (ids[0] >= block.rows[0] and ids[-1] < block.rows[1])
        assert len(ids) == block.num_rows
        if chunks:
            stored = torch.cat([stored for _, stored in chunks])
            assert _numpy(stored).tobytes() == tensors[f"{index}.values"].tobytes()
        owners = reader.rows[index].owners
        if owners is not None:
            assert owners(0, block.num_rows).numpy().tobytes() == tensors[f"{index}.owners"].tobytes()
    for index, tensor in enumerate(reader.dense().values()):
        assert _numpy(tensor).tobytes() == tensors[f"dense.{index}"].tobytes()


def _numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Convert to numpy; bfloat16 by its bits in float32, as in the second reader."""
    if tensor.dtype == torch.bfloat16:
        bits = tensor.contiguous().view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)
        return (bits << 16).view(np.float32)
    return tensor.numpy()


def run(mutations: int, seed: int, only: int | None = None, report: Callable[[str], None] = print) -> int:
    """Run the mutations; return the number that failed."""
    failures = 0

    def hang(_signal: int, _frame: FrameType | None) -> None:
        raise _Hang(f"more than {_SECONDS} seconds")

    signal.signal(signal.SIGALRM, hang)
    tracemalloc.start()
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="states-") as directory,
        mock.patch.object(digests_module, "PIECE_BYTES", _PIECE_BYTES),
        mock.patch.object(page, "_PIECE_BYTES", _PIECE_BYTES),
        np.errstate(all="ignore"),
    ):
        states_stream.make(Path(directory))
        fuzzers = [Fuzzer(_STREAM, seed), Fuzzer(Path(directory), seed)]
        for number in range(mutations) if only is None else [only]:
            signal.setitimer(signal.ITIMER_REAL, _SECONDS)
            try:
                fuzzers[number % len(fuzzers)].run(number)
            except (Exception, _Hang) as error:
                failures += 1
                report(f"mutation {number} of seed {seed}: {type(error).__name__}: {str(error)[:300]}")
                if only is not None:
                    raise
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    outcomes = sum((fuzzer.outcomes for fuzzer in fuzzers), Counter[str]())
    reasons = sum((fuzzer.reasons for fuzzer in fuzzers), Counter[str]())
    largest = max(fuzzer.largest for fuzzer in fuzzers)
    for outcome, count in sorted(outcomes.items()):
        report(f"{count:8d} {outcome}")
    report(f"{len(reasons)} reasons, the rarest: {reasons.most_common()[-5:]}")
    report(f"{failures} failed; at most {largest:.1f} times a file's bytes; {time.monotonic() - start:.0f} s")
    for fuzzer in fuzzers:
        fuzzer.close()
    return failures


def cap_memory() -> None:
    """Limit the address space to slightly more than what is now mapped."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _ADDRESS_SPACE, resource.RLIM_INFINITY))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this one")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    Storage("memory://").create("warm", zlib.compress(b"up"))  # starts its threads before the cap
    cap_memory()
    return 1 if run(args.mutations, args.seed, args.only) else 0


if __name__ == "__main__":
    sys.exit(main())
