"""Mutated manifests and parts: ``python -m tests.stream.fuzz_stream --mutations 100000 --seed 0``.

Each mutation of the frozen stream must be refused with a typed error, or give the same result as a second reader of the
same bytes. Other exceptions, a changed table after an error, a hang, and memory out of proportion to the file's size
are failures. Mutation ``n`` of a seed does not depend on the others: ``--only n`` repeats it.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import torch
import xxhash

from delta_tracker import Predictor
from delta_tracker.errors import CorruptPartError, MalformedError, StreamError
from delta_tracker.stream.format import part_reader as part_module
from delta_tracker.stream.format.manifest import Manifest, Part
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.stream.format.part_reader import PartReader
from delta_tracker.stream.log import entry_name
from delta_tracker.stream.storage.storage import Storage
from tests.stream.golden import reader as page
from tests.stream.golden.make import ITEM, USER
from tests.stream.mutations import Draw, mutate_entry, mutate_part
from tests.stream.streams import chunks_of

_STREAM = Path(__file__).parent / "golden" / "format-1" / "stream"
_SECONDS = 10  # per mutation, which takes a millisecond
# Memory that a reader may use per byte of a file: parsed JSON takes some 20 times its text, ids 8 bytes per packed one.
TIMES_FILE, AND_BYTES = 40, 1 << 20
_ADDRESS_SPACE = 512 << 20  # in addition to what the imported libraries have mapped
_PIECE_BYTES = 64


class _Hang(BaseException):
    """A mutation took too long."""


class Fuzzer:
    """The frozen stream, its mutations, and checks of their results."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        names = [path.relative_to(_STREAM).as_posix() for path in sorted(_STREAM.rglob("*.json"))]
        self._entries = {name: (_STREAM / name).read_bytes() for name in names}
        self._manifests = {name: parse_manifest(name, data) for name, data in self._entries.items()}
        self._parts = {
            part.name: (_STREAM / part.name).read_bytes() for each in self._manifests.values() for part in each.parts
        }
        self._storage = Storage("memory://")
        for name, data in self._parts.items():
            self._storage.put(name, [memoryview(data)])
        self._root = Path(tempfile.mkdtemp(prefix="fuzz-"))
        shutil.copytree(_STREAM, self._root, dirs_exist_ok=True)
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
        else:
            self._run_part(draw, name)

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
        if manifest is None:
            self.outcomes["manifest refused"] += 1
            return
        assert parse_manifest(name, manifest.to_json()) == manifest
        whole = [self._read(manifest, part, self._parts.get(part.name)) for part in manifest.parts]
        self.outcomes["manifest right, parts " + ("right" if all(whole) else "refused")] += 1

    def _run_part(self, draw: Draw, name: str) -> None:
        manifest = self._manifests[name]
        part = draw.choice(manifest.parts)
        data = mutate_part(draw, self._parts[part.name])
        changed = part
        if draw.chance(0.9):
            changed = replace(part, num_bytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))
        manifest = replace(manifest, parts=tuple(changed if each is part else each for each in manifest.parts))
        self._storage.put(part.name, [memoryview(data)])
        (self._root / part.name).write_bytes(data)
        try:
            is_right = self._read(manifest, changed, data)
            assert not is_right or changed is not part or data == self._parts[part.name]
            if draw.chance(0.1):
                entry = manifest.to_json()
                self._sync(draw, name, entry, parse_manifest(name, entry))
        finally:
            self._storage.put(part.name, [memoryview(self._parts[part.name])])
            (self._root / part.name).write_bytes(self._parts[part.name])
        self.outcomes["part " + ("right" if is_right else "refused")] += 1

    def _read(self, manifest: Manifest, part: Part, data: bytes | None) -> bool:
        """Read a part in memory and in pieces; return True if both are correct, False if both refuse it."""
        found = []
        for memory_bytes in (1 << 30, 0):
            with self._bounded(len(data or b"")):
                try:
                    reader = PartReader(self._storage, part, manifest, memory_bytes=memory_bytes)
                except CorruptPartError as error:
                    self._check_text(error)
                    found.append(False)
                    continue
            assert data is not None
            _check(reader, data)
            found.append(True)
        assert found[0] == found[1], "memory and pieces differ"
        return found[0]

    def _check_text(self, error: CorruptPartError | MalformedError) -> None:
        assert len(str(error)) < 3000
        self.reasons[re.sub(r"[^a-z ]+", "*", error.reason)[:60]] += 1

    def _sync(self, draw: Draw, name: str, data: bytes, manifest: Manifest | None) -> None:
        """Sync a predictor at the version before this entry, or a new one, to the mutated entry."""
        version = self._manifests[name].version
        if name != entry_name(version):
            return
        storage = Storage("memory://")
        for part in {part.name for each in self._manifests.values() for part in each.parts}:
            storage.put(part, [memoryview((self._root / part).read_bytes())])
        for before in range(version):
            storage.create(entry_name(before), self._entries[entry_name(before)])
        tables = {USER: torch.full((12, 4), -1.0), ITEM: torch.full((600, 2), -1.0, dtype=torch.float16)}
        predictor = Predictor(tables, storage, dense=False)
        if version > 1 and draw.chance(0.8):
            # Earlier parts are not mutated: each version has its own.
            predictor.sync()
        held = {fqn: table.clone() for fqn, table in tables.items()}
        at, start = predictor.version, predictor.manifest
        storage.create(entry_name(version), data)
        with mock.patch.object(part_module, "MEMORY_BYTES", draw.choice([0, 1 << 20])):
            try:
                predictor.sync()
            except StreamError:
                if predictor.version == at:  # otherwise the snapshot before it was correctly applied first
                    assert predictor.manifest is start
                    assert all(torch.equal(tables[fqn], held[fqn]) for fqn in tables), "half applied"
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
        for fqn, table in tables.items():
            assert np.array_equal(table.numpy(), state[fqn], equal_nan=True), "applied wrongly"
        self.outcomes["sync right"] += 1

    @contextmanager
    def _bounded(self, num_bytes: int) -> Iterator[None]:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        yield
        taken = tracemalloc.get_traced_memory()[1] - before
        assert taken <= TIMES_FILE * num_bytes + AND_BYTES, f"{taken} bytes for a file of {num_bytes}"
        self.largest = max(self.largest, taken / max(num_bytes, 1024))


def _check(reader: PartReader, data: bytes) -> None:
    """Check that every block and tensor equals what the second reader finds in the same bytes."""
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
    fuzzer = Fuzzer(seed)
    failures = 0

    def hang(_signal: int, _frame: FrameType | None) -> None:
        raise _Hang(f"more than {_SECONDS} seconds")

    signal.signal(signal.SIGALRM, hang)
    tracemalloc.start()
    start = time.monotonic()
    with mock.patch.object(part_module, "_PIECE_BYTES", _PIECE_BYTES), np.errstate(all="ignore"):
        for number in range(mutations) if only is None else [only]:
            signal.setitimer(signal.ITIMER_REAL, _SECONDS)
            try:
                fuzzer.run(number)
            except (Exception, _Hang) as error:
                failures += 1
                report(f"mutation {number} of seed {seed}: {type(error).__name__}: {str(error)[:300]}")
                if only is not None:
                    raise
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    for outcome, count in sorted(fuzzer.outcomes.items()):
        report(f"{count:8d} {outcome}")
    report(f"{len(fuzzer.reasons)} reasons, the rarest: {fuzzer.reasons.most_common()[-5:]}")
    report(f"{failures} failed; at most {fuzzer.largest:.1f} times a file's bytes; {time.monotonic() - start:.0f} s")
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
