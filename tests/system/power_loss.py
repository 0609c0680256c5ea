"""Rebuilds what a power loss leaves of a stream, from its system calls: ``python -m tests.system.power_loss``.

Children write a stream under strace: they claim, publish, compact and retain. The trace is replayed on a model of a
file system in which an fsync of a file keeps its bytes, an fsync of a directory keeps its names, and everything else
may be lost. After each call, the model yields the state in which only synced bytes and names survive, and states in
which random unsynced ones survive too. In each state, every acknowledged version must be readable bit for bit,
``verify`` must find no damage, and a new publisher must continue.

The first run has no fault. In the others, one fsync fails, or the first child is killed at a call and a second one
continues. Prints the number of faults and of states as JSON.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from delta_tracker import Predictor, Storage
from delta_tracker.cli.main import main as command_line
from delta_tracker.errors import CorruptPartError, StorageError
from delta_tracker.stream.format.part_reader import read_parts
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from tests.stream.streams import FQN, Writer, chunks_of
from tests.system.syscall_sweep import run_traced

_CALLS = ("write", "fsync", "link", "linkat", "rename", "unlink", "mkdir", "openat")
_SIZE = {"num_rows": 4, "dim": 2}
_ATTEMPTS = 5
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_CALL = re.compile(r" *(\w+)\((.*)\) += (-?\d+)")
_RESUMED = re.compile(r" *<\.\.\. \w+ resumed>(.*)")
_OPEN_FILE = re.compile(r"\d+<([^>]*)>")


class _Life:
    """A process that writes a stream, and notes in the file ``marks`` what it tries and what was acknowledged."""

    def __init__(self, root: Path) -> None:
        self.url = f"file://{root}/disk/deep/stream"
        self._marks = os.open(root / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._writer: Writer

    def first(self) -> None:
        """Write a stream with every operation."""
        self._claim()
        self._publish("snapshot")
        for row in range(3):
            self._publish("delta", row)
        self._upkeep(lambda: compact(Storage(self.url), fold=10.0))
        self._publish("delta", 1)
        self._upkeep(lambda: compact(Storage(self.url), fold=1e-9))
        self._retain()
        self._publish("snapshot")
        self._publish("delta", 2)
        self._retain()
        self.second()

    def second(self) -> None:
        """Continue as another publisher."""
        self._claim()
        self._publish("snapshot")
        self._retain()
        self._publish("delta", 3)

    def _claim(self) -> None:
        def claim() -> None:
            storage = Storage(self.url, create=True)
            storage.probe()
            self._writer = Writer(storage, **_SIZE)

        self._upkeep(claim)

    def _publish(self, kind: str, *ids: int) -> None:
        writer = self._writer
        rows = list(ids) if kind == "delta" else list(range(writer.spec.num_rows))
        writer.table[rows] = torch.randn(len(rows), writer.spec.dim)
        for _ in range(_ATTEMPTS):
            self._note_try()
            try:
                entry = writer.write(kind, [writer.rows(rows if kind == "delta" else None)])  # type: ignore[arg-type]
            except StorageError:
                self._note_try()
            else:
                self._mark(f"ack {entry.version} {_text(writer.table)}")
                return
        raise AssertionError(f"{kind} fails {_ATTEMPTS} times")

    def _note_try(self) -> None:
        for ahead in (1, 2):  # a commit continues after an earlier attempt
            self._mark(f"try {self._writer.claim.head.version + ahead} {_text(self._writer.table)}")

    def _retain(self) -> None:
        newest = StreamLog(Storage(self.url)).newest_snapshot()
        assert newest is not None, "a snapshot was published"
        self._mark(f"retain {newest.version}")
        self._upkeep(lambda: retain(Storage(self.url), Retention(versions=1, grace_seconds=0.0)))

    @staticmethod
    def _upkeep(action: Callable[[], object]) -> None:
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(StorageError):
                action()
                return
        action()

    def _mark(self, text: str) -> None:
        os.write(self._marks, f"{text}\n".encode())


def _text(table: Tensor) -> str:
    return table.numpy().tobytes().hex()


def _unquoted(text: str) -> bytes:
    return codecs.escape_decode(text.encode("latin-1"))[0]  # type: ignore[attr-defined]  # as strace escapes it


@dataclass(frozen=True)
class Call:
    """A system call that returned, as strace prints it."""

    thread: str
    name: str
    arguments: str
    result: int

    @property
    def written(self) -> bytes:
        """Bytes that a ``write`` wrote."""
        (text,) = _STRING.findall(self.arguments)
        return _unquoted(text)[: self.result]


@dataclass
class _File:
    data: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    """A directory: its names on disk, and the later changes of its names, in order. None deletes a name."""

    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    changes: list[tuple[str, _File | _Folder | None]] = field(default_factory=list)

    def change(self, name: str, node: _File | _Folder | None) -> None:
        """Add, replace or delete a name."""
        if node is None:
            del self.names[name]
        else:
            self.names[name] = node
        self.changes.append((name, node))

    def sync(self) -> None:
        """Keep all names."""
        self.synced, self.changes = dict(self.names), []

    def survivors(self, survives: Callable[[], bool]) -> dict[str, _File | _Folder]:
        """Return the names after a power loss; ``survives`` decides for each change that was not synced."""
        found: dict[str, _File | _Folder | None] = dict(self.synced)
        found |= dict(change for change in self.changes if survives())
        return {name: node for name, node in found.items() if node is not None}


Image = dict[str, bytes | None]  # path to the bytes of a file, None for a directory


class Disk:
    """Model of the file system below a directory that is on disk itself."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._top = _Folder()

    def apply(self, call: Call) -> bool:
        """Execute a system call that succeeded; return True if it changes or syncs something in this file system."""
        if call.name in ("write", "fsync"):
            opened = _OPEN_FILE.match(call.arguments)
            paths = [] if opened is None else [opened[1]]
        else:
            paths = [_unquoted(each).decode() for each in _STRING.findall(call.arguments)]
        if not paths or not all(f"{path}/".startswith(f"{self._root}/") for path in paths):
            return False
        if call.name == "openat" and "O_CREAT" not in call.arguments:
            return False
        *_, (folder, name) = places = [self._place(path) for path in paths]
        if call.name in ("mkdir", "openat"):
            folder.change(name, _Folder() if call.name == "mkdir" else _File())
        elif call.name in ("link", "linkat", "rename"):
            source, old = places[0]
            folder.change(name, source.names[old])
            if call.name == "rename":
                source.change(old, None)
        elif call.name == "unlink":
            folder.change(name, None)
        else:
            node = folder.names[name] if name else folder
            if isinstance(node, _Folder):
                node.sync()
            elif call.name == "write":
                node.data += call.written
            else:
                node.synced = node.data
        return True

    def image(self, survives: Callable[[], bool]) -> Image:
        """Return what a power loss leaves; ``survives`` decides for everything that was not synced."""
        found: Image = {}

        def visit(folder: _Folder, path: str) -> None:
            for name, node in sorted(folder.survivors(survives).items()):
                if isinstance(node, _Folder):
                    found[path + name] = None
                    visit(node, f"{path}{name}/")
                else:
                    found[path + name] = node.data if survives() else node.synced

        visit(self._top, "")
        return found

    def _place(self, path: str) -> tuple[_Folder, str]:
        """Return the directory of a path and the last part of the path."""
        *above, name = os.path.relpath(path, self._root).split("/")
        folder = self._top
        for each in above:
            below = folder.names[each]
            assert isinstance(below, _Folder), path
            folder = below
        return folder, "" if name == "." else name


@dataclass
class Known:
    """What a trace has shown up to a call: the tables that versions may have, and the acknowledged versions."""

    tables: dict[int, list[str]] = field(default_factory=dict)
    acknowledged: dict[int, str] = field(default_factory=dict)
    first: int = 0  # retention may have deleted the versions before this one

    def note(self, mark: str) -> None:
        """Add a mark of a writer."""
        what, version, *table = mark.split()
        if what == "try":
            self.tables.setdefault(int(version), []).extend(table)
        elif what == "ack":
            self.acknowledged[int(version)] = table[0]
        else:
            self.first = int(version)


def calls(trace: str) -> list[Call]:
    """Return the system calls of a trace, in the order in which they returned."""
    found = []
    unfinished: dict[str, str] = {}
    for line in trace.splitlines():
        thread, _, text = line.partition(" ")
        if text.endswith("<unfinished ...>"):
            unfinished[thread] = text.removesuffix("<unfinished ...>")
            continue
        resumed = _RESUMED.match(text)
        match = _CALL.match(text if resumed is None else unfinished.pop(thread) + resumed[1])
        if match is not None:
            found.append(Call(thread, match[1], match[2], int(match[3])))
    return found


def faults(root: Path, trace: str) -> list[str]:
    """Return an injection for each fsync that can fail, and for each call on the stream at which a kill can come."""
    disk, found = Disk(root / "disk"), []
    counts: Counter[tuple[str, str]] = Counter()
    for call in calls(trace):
        counts[call.thread, call.name] += 1
        if call.result >= 0 and disk.apply(call):
            number = counts[call.thread, call.name]
            found += [f"fsync:error=EIO:when={number}"] * (call.name == "fsync")
            found.append(f"{call.name}:signal=KILL:when={number}")
    return sorted(set(found))


def states(root: Path, traces: Sequence[str], num_random: int) -> Iterator[tuple[Image, Known]]:
    """Yield the states after each call from the first fault on, and what is known there, without repetitions.

    Yields all states if there was no fault. ``known`` changes afterwards.
    """
    disk, known = Disk(root / "disk"), Known()
    chance = random.Random(0)
    seen: set[str] = set()
    runs = [calls(trace) for trace in traces]
    is_killed = len(runs) > 1
    failed = [number for number, call in enumerate(runs[0]) if call.name == "fsync" and call.result < 0]
    begin = len(runs[0]) - 1 if is_killed else min(failed, default=0)
    # Nothing that was not synced; with random states, also everything.
    kept: list[Callable[[], bool]] = [lambda: False, *([lambda: True] if num_random else [])]
    kept += [lambda: chance.random() < 0.5] * num_random
    for number, call in enumerate(itertools.chain.from_iterable(runs)):
        if call.name == "write" and f"<{root}/marks>" in call.arguments:
            known.note(call.written.decode())
        elif call.result >= 0:
            disk.apply(call)
        if number < begin:
            continue
        for survives in kept:
            image = disk.image(survives)
            key = repr((image, known))
            if key not in seen:
                seen.add(key)
                yield image, known


def _is_undamaged(url: str) -> bool:
    """Return the verdict of ``verify``."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = command_line(["verify", url, "--json"])
    assert code == 0, f"verify: {out.getvalue()}"
    return True


def _tables(log: StreamLog, first: int) -> dict[int, str]:
    """Return the table of each version with rows that can be read from a snapshot on.

    Retention may have deleted the parts of the versions before ``first``.
    """
    merged = {each.last: each for each in log.merged() if each.kind == "snapshot"}
    found: dict[int, str] = {}
    table: Tensor | None = None
    before = -1
    for version in log.versions():
        entry = log.read(version)
        assert entry is not None
        start = log.read_merged(merged[version]) if version in merged else entry if entry.kind == "snapshot" else None
        if start is not None:
            table, entry = torch.full((_SIZE["num_rows"], _SIZE["dim"]), -1.0), start
        elif version != before + 1:
            table = None
        try:
            parts = read_parts(log.storage, entry, memory_bytes=1 << 20)
        except CorruptPartError:
            assert version < first
            table = None
        if table is not None:
            rows = [each for part in parts for each in part.rows]
            for each in sorted(rows, key=lambda each: each.ids is not None):  # listed rows overlay whole blocks
                for ids, stored in chunks_of(each, 100):
                    table[ids] = stored
            if entry.kind != "claim":
                found[version] = _text(table)
        before = version
    return found


def check(root: Path, image: Image, known: Known) -> None:
    """Write a state to a directory, and check that nothing acknowledged is lost and that a publisher continues."""
    root.mkdir()
    for name, data in image.items():
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)
    url = f"file://{root}/deep/stream"
    storage = Storage(url, fsync=False)
    versions = StreamLog(storage).versions()
    newest = max(known.acknowledged, default=-1)
    assert max(versions, default=-1) >= newest, f"version {newest} is lost, and the log has {versions}"
    if versions:
        assert _is_undamaged(url)
    tables = _tables(StreamLog(storage), known.first)
    for version, table in tables.items():
        assert table in known.tables[version], f"version {version} has rows that were never published"
    for version, table in known.acknowledged.items():
        assert version < known.first or tables.get(version) == table, f"version {version} is lost or has other rows"
    model = {FQN: torch.full((_SIZE["num_rows"], _SIZE["dim"]), -1.0)}
    predictor = Predictor(model, storage)
    if newest >= 0:
        version = predictor.sync() or -1
        assert version >= newest, f"a new predictor reaches {version}, not {newest}"
        assert _text(model[FQN]) == tables[max(tables)], f"a new predictor at {version} has other rows"
    storage = Storage(url, fsync=False, create=True)
    storage.probe()
    writer = Writer(storage, **_SIZE)
    for publish in (writer.snapshot, lambda: writer.delta([1, 2])):
        publish()
        assert predictor.sync() == writer.claim.head.version
        assert torch.equal(model[FQN], writer.table)
    assert _is_undamaged(url)


def check_all(
    root: Path, traces: Sequence[str], *, num_random: int = 0, stop: int | None = None, every: int = 1
) -> int:
    """Check one in ``every`` of the first ``stop`` states of a run, by default all; return their number.

    Raises:
        AssertionError: at the first state that violates a promise.
    """
    count = 0
    place = root / "state"
    for image, known in itertools.islice(states(root, traces, num_random), 0, stop, every):
        try:
            check(place, image, known)
        except Exception as error:
            listed = [f"{name} {'' if data is None else len(data)}" for name, data in image.items()]
            raise AssertionError(f"{known}: {type(error).__name__}: {error}\n" + "\n".join(listed)) from error
        shutil.rmtree(place)
        count += 1
    return count


def traced(root: Path, injection: str | None = None) -> list[str]:
    """Let a child write a stream; return the traces of it and of the one that continues if the first was killed."""
    (root / "disk").mkdir(parents=True)
    options = ["-s", "1000000", f"--trace={','.join(_CALLS)}"]
    injected = [] if injection is None else ["-e", f"inject={injection}"]
    found = []
    for life, more in ((_Life.first, injected), (_Life.second, [])):
        status = run_traced(root, partial(_live, root, life), [*options, *more])
        found.append((root / "strace").read_text(encoding="latin-1"))
        if status == 0:
            return found
        assert status < 0, (root / "error").read_text()
        assert "KILL" in (injection or ""), status
    raise AssertionError(f"the second process fails after {injection}")


def _live(root: Path, life: Callable[[_Life], None], wait: Callable[[], None]) -> None:
    wait()
    life(_Life(root))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=2, help="random states after each call")
    parser.add_argument("--every", type=int, default=1, help="inject one fault in so many")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="power-") as name:
        root = Path(name)
        traces = traced(root / "whole")
        num_states = check_all(root / "whole", traces, num_random=options.random)
        injections = faults(root / "whole", traces[0])[:: options.every]
        for number, injection in enumerate(injections):
            place = root / str(number)
            try:
                num_states += check_all(place, traced(place, injection))
            except AssertionError as error:
                raise AssertionError(f"after {injection}: {error}") from error
            shutil.rmtree(place)
    seconds = round(time.monotonic() - begin, 1)
    print(json.dumps({"faults": len(injections), "states": num_states, "seconds": seconds}))


if __name__ == "__main__":
    sys.exit(main())
