"""A trainer at full speed, its predictors, and everything killed at random: ``python -m tests.system.endurance``.

The trainer has one or two ranks. It publishes twice a second with snapshots, retention and compaction, and continues
from its own stream after each kill. One predictor is never killed, one is killed and continues with its tables, and one
is killed and starts again. The disk of the stream is full now and then (this needs root, to mount it).

Every few seconds, and at the end, all predictors that hold the trainer's last version must have its rows bit for bit.
At the end, a new predictor and a restored trainer must have them too, and ``delta-tracker verify`` must find nothing.
From :data:`_MIN_MINUTES` on, memory, latency, and the files and bytes of the stream must not grow from the second
quarter to the last. Prints figures of each quarter as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.system.crash import import_early
from tests.system.endurance_processes import Paths, Server, Trainer

_DISK_BYTES = 1 << 30
_SAMPLE_SECONDS = 2.0
_FULL_SECONDS = 3.0
_END_SECONDS = 120.0
_MIN_MINUTES = 30.0
_FILES_PER_LIFE = 8
_SETTLED_SECONDS = 20.0  # age of a process from which its memory counts
# Errors with which a trainer may end that was not killed: another rank was, or its disk is full.
_EXPECTED = ("RankLostError", "RankFailedError", "No space left", "gloo", "DistNetworkError", "Connection closed")


class Process:
    """A forked process."""

    def __init__(self, name: str, body: Callable[[], None], log: Path) -> None:
        self.name, self._log = name, log
        self.begin = time.monotonic()
        self.was_killed = False
        log.unlink(missing_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                with log.open("w", buffering=1) as said:
                    os.dup2(said.fileno(), 1)
                    os.dup2(said.fileno(), 2)
                    body()
                code = 0
            except BaseException:  # noqa: BLE001  the parent reads it
                with log.open("a") as said:
                    traceback.print_exc(file=said)
            finally:
                os._exit(code)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.was_killed = True
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def log(self) -> str:
        """The end of what the process printed."""
        return self._log.read_text(errors="replace")[-3000:] if self._log.exists() else ""

    @property
    def anonymous_bytes(self) -> int | None:
        """Memory of the process that is not of files; None after its end."""
        try:
            lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        except (OSError, ValueError):
            return None
        found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:")]
        return found[0] if found else None


class Endurance:
    """One run.

    Args:
        paths: empty directories.
        seed: random seed of the kills.
        seconds: length of the run.
        can_fill: True if the stream's directory is a disk of its own, which may be filled.
    """

    def __init__(self, paths: Paths, seed: int, seconds: float, *, can_fill: bool) -> None:
        self._paths, self._can_fill = paths, can_fill
        self._draw = random.Random(seed)
        self._seconds = seconds
        self._pause = min(40.0, seconds / 8)  # mean time between two kills
        self._num_lives = 0
        self._ranks: list[Process] = []
        self._servers: dict[str, Process] = {}
        self._samples: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self) -> None:
        """Run, end everything, and compare."""
        begin = time.monotonic()
        next_kill, next_full = self._pause / 2, self._seconds / 4
        try:
            self._start_missing()
            while (now := time.monotonic() - begin) < self._seconds and not self.problems:
                if now > next_kill:
                    self._kill()
                    next_kill = now + self._draw.expovariate(1 / self._pause)
                if self._can_fill and now > next_full:
                    self._fill()
                    next_full = now + self._draw.expovariate(1 / (6 * self._pause))
                self._start_missing()
                self._sample(now)
                time.sleep(_SAMPLE_SECONDS)
            self._end()
        finally:
            for process in [*self._ranks, *self._servers.values()]:
                process.kill()

    def figures(self) -> dict[str, Any]:
        """Return the medians of each quarter, and counts."""
        quarters: list[dict[str, Any]] = []
        events = [json.loads(line) for name in _SERVERS for line in self._lines(name)]
        latencies = [(each["at"] - self._began_at, each["latency"]) for each in events if "latency" in each]
        for number in range(4):
            bounds = number * self._seconds / 4, (number + 1) * self._seconds / 4
            inside = [each for each in self._samples if bounds[0] <= each["at"] < bounds[1]]
            found = sorted(value for at, value in latencies if bounds[0] <= at < bounds[1])
            quarter: dict[str, Any] = {}
            for key in ("trainer MB", "kept MB", "files", "stream MB"):
                values = [each[key] for each in inside if each.get(key) is not None]
                quarter[key] = round(statistics.median(values), 1) if values else None
            if found:
                quarter["latency p50 ms"] = round(1000 * statistics.median(found))
                quarter["latency p99 ms"] = round(1000 * found[int(0.99 * len(found))])
            quarters.append(quarter)
        counts: Counter[str] = Counter(self.counts)
        counts["comparisons"] = sum("compared" in each for each in events)
        counts["lookups of servers that ended"] = sum(each.get("lookups", 0) for each in events)
        counts["resyncs of servers that ended"] = sum(each.get("resyncs", 0) for each in events)
        return {"quarters": quarters, "counts": dict(counts)}

    def check_growth(self, figures: Mapping[str, Any]) -> None:
        """Add a problem for each figure that grew from the second quarter to the last.

        Retention keeps each claim and its parent, and for an hour what a killed trainer has written of a version.
        """
        _, before, _, after = figures["quarters"]
        for key, factor, slack in (*_BOUNDS, ("files", 1.25, _FILES_PER_LIFE * self._num_lives)):
            if before.get(key) is None or after.get(key) is None or after[key] > factor * before[key] + slack:
                self.problems.append(f"{key} grew from {before.get(key)} to {after.get(key)}")

    def _lines(self, name: str) -> list[str]:
        file = self._paths.events(name)
        # a kill may leave half a line
        return [line for line in file.read_text().split("\n") if line.endswith("}")] if file.exists() else []

    def _start_missing(self) -> None:
        """Start what has ended, after a look at how it ended."""
        if not self._samples and not self._ranks:
            self._began_at = time.time()
        if any(rank.poll() is not None for rank in self._ranks):
            self._end_ranks()
        if not self._ranks:
            self._num_lives += 1
            world_size = self._draw.choice([1, 2])
            self._ranks = [self._rank(f"life-{self._num_lives}", rank, world_size) for rank in range(world_size)]
        for name in _SERVERS:
            server = self._servers.get(name)
            if server is not None and server.poll() is not None and not server.was_killed:
                self.problems.append(f"predictor {name} ended: {server.log}")
            if server is None or server.poll() is not None:
                self._servers[name] = self._server(name)

    def _end_ranks(self) -> None:
        """Wait until the other ranks have noticed the end of one, and look at the errors of all."""
        deadline = time.monotonic() + 5.0
        while any(rank.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        for rank in self._ranks:
            rank.kill() if rank.poll() is None else None
            if not rank.was_killed and not any(each in rank.log for each in _EXPECTED):
                self.problems.append(f"{rank.name} ended: {rank.log}")
        if not any(rank.was_killed for rank in self._ranks):
            self.counts["trainers that ended on a full disk"] += 1
        self._ranks = []

    def _rank(self, life: str, rank: int, world_size: int, *, checks: bool = False) -> Process:
        def body() -> None:
            trainer = Trainer(self._paths, life, rank, world_size)
            if checks:
                trainer.check()
            else:
                trainer.restore()
                trainer.train()

        return Process(f"{life}, rank {rank}", body, self._paths.root / f"{life}-{rank}.log")

    def _server(self, name: str) -> Process:
        def body() -> None:
            Server(self._paths, name, survives=name == "continues").serve()

        return Process(name, body, self._paths.root / f"{name}.log")

    def _kill(self) -> None:
        """Kill the trainer, one of its ranks, or a predictor."""
        target = self._draw.choice(["trainer", "trainer", "rank", "continues", "new"])
        self.counts[f"kills: {target}"] += 1
        if target == "trainer":
            for rank in self._ranks:
                rank.kill()
        elif target == "rank":
            self._draw.choice(self._ranks).kill()
        else:
            self._servers[target].kill()

    def _fill(self) -> None:
        """Fill the disk for some seconds."""
        self.counts["full disks"] += 1
        filler = self._paths.disk / "filler"
        try:
            with filler.open("wb", buffering=0) as file:
                end = time.monotonic() + _FULL_SECONDS
                for block in (1 << 20, 1 << 12):
                    try:
                        while file.write(bytes(block)) == block:
                            pass
                    except OSError:
                        pass
                while time.monotonic() < end:
                    time.sleep(0.1)
        finally:
            filler.unlink()

    def _sample(self, now: float) -> None:
        sample: dict[str, Any] = {"at": now}
        if self._ranks and time.monotonic() - self._ranks[0].begin > _SETTLED_SECONDS:
            sample["trainer MB"] = _megabytes(self._ranks[0].anonymous_bytes)
        sample["kept MB"] = _megabytes(self._servers["kept"].anonymous_bytes)
        num_files, num_bytes = _size(self._paths.disk / "stream")
        sample |= {"files": num_files, "stream MB": round(num_bytes / 1e6, 2)}
        self._samples.append(sample)

    def _end(self) -> None:
        """Let the trainer publish once more, and all compare; then a new predictor and a restored trainer."""
        self._start_missing()
        time.sleep(1.0)  # a predictor that starts after the last version would not compare older rows with it
        self._paths.is_over.touch()
        deadline = time.monotonic() + _END_SECONDS
        while not self._paths.last.exists() and time.monotonic() < deadline and not self.problems:
            if all(rank.poll() == 0 for rank in self._ranks):
                continue
            self._start_missing()
            time.sleep(0.1)
        if not self._paths.last.exists():
            self.problems.append("the trainer published no last version")
            return
        self._servers["late"] = self._server("late")
        for name, server in self._servers.items():
            self._wait(name, [server], deadline + 60.0)
        world_size = len(self._ranks)
        self._wait("trainer", self._ranks, deadline)
        restored = [self._rank("restored", rank, world_size, checks=True) for rank in range(world_size)]
        self._wait("restored trainer", restored, deadline + 60.0)
        command = [sys.executable, "-W", "ignore", "-m", "delta_tracker.cli", "verify", self._paths.url]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        if done.returncode:
            self.problems.append(f"verify: {done.stdout[-1000:]} {done.stderr[-1000:]}")
        self.counts["last version"] = int(self._paths.last.read_text())
        self.counts["lives"] = self._num_lives

    def _wait(self, what: str, processes: Sequence[Process], deadline: float) -> None:
        while any(each.poll() is None for each in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
        for each in processes:
            if each.poll() != 0:
                self.problems.append(f"{what} ended with {each.poll()}: {each.log}")
                each.kill()


_SERVERS = ("kept", "continues", "new")
# Figure, largest factor from the second quarter to the last, and what may be added to it.
_BOUNDS = (
    ("trainer MB", 1.1, 8.0),
    ("kept MB", 1.1, 8.0),
    ("stream MB", 1.25, 8.0),
    ("latency p50 ms", 1.25, 20.0),
    ("latency p99 ms", 1.5, 200.0),
)


def _megabytes(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else round(num_bytes / 1e6, 2)


def _size(folder: Path) -> tuple[int, int]:
    """Return the number and the bytes of the files below a folder."""
    count = num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # retention has deleted it
                num_bytes += Path(parent, name).stat().st_size
                count += 1
    return count, num_bytes


@contextmanager
def _disk(root: Path) -> Iterator[tuple[Path, bool]]:
    """Mount a disk of its own for the stream; yield its directory, and False if that is not possible."""
    (directory := root / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(directory)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, check=False, capture_output=True).returncode == 0
    try:
        yield directory, is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run once; return 0 if no check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    import_early()
    root = Path(tempfile.mkdtemp(prefix="endurance-"))
    try:
        with _disk(root) as (disk, is_mounted):
            run = Endurance(Paths(root, disk), options.seed, 60 * options.minutes, can_fill=is_mounted)
            run.run()
            figures = run.figures()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.minutes >= _MIN_MINUTES:
        run.check_growth(figures)
    answer = {"minutes": options.minutes, **figures, "problems": len(run.problems)}
    text = json.dumps(answer, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print("\n".join(run.problems), file=sys.stderr)
    print(text)
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
