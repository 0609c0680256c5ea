"""Demo of a warm standby on MovieLens-100K: ``python -m examples.movielens.failover`` or ``make demo-failover``.

A job of two ranks trains and publishes, a second job follows its stream, and so does a predictor. The trainer is killed
twice. Each time the standby takes over, and a new standby is started.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass, field
from multiprocessing import RawValue
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from examples.movielens.__main__ import renew
from examples.movielens.data import Ratings, load_ratings
from examples.movielens.failover_job import digests_path, live, logits_path, serve, train_without_interruption
from examples.movielens.forks import Forks, ProcessFailedError, import_early
from examples.movielens.settings import WORLD_SIZE, Settings
from examples.movielens.verify import TablesDifferError, verify_run

LIMIT_SECONDS = 600.0
KILLS = (0.3, 0.63)
"""Shares of the batches after which the trainer is killed."""
_RANKS = range(WORLD_SIZE)


@dataclass(frozen=True, slots=True)
class Handover:
    """A takeover.

    Args:
        job: number of the former trainer.
        kind: how it ended.
        trained: number of batches that it had trained.
        batches: number of batches of the version that the new trainer continued.
    """

    job: int
    kind: str
    trained: int
    batches: int


@dataclass(slots=True)
class Story:
    """What happened in a run."""

    handovers: list[Handover] = field(default_factory=list)
    applied: list[dict[str, Any]] = field(default_factory=list)
    """The predictor's event of each version."""

    def gaps(self) -> tuple[list[float], list[float]]:
        """Return the seconds between two versions of a generation, and those without a version for each new generation.

        If a trainer ends before its first version, the same seconds are those of two generations.
        """
        inside: list[float] = []
        between: list[float] = []
        for before, event in zip(self.applied, self.applied[1:], strict=False):
            seconds, num_new = event["at"] - before["at"], event["generation"] - before["generation"]
            if num_new:
                between += [seconds] * num_new
            else:
                inside.append(seconds)
        return inside, between


class Director:
    """Parent of the demo's processes: starts jobs, and kills the trainer at the planned batches.

    Ratings arrive up to the next kill only, until there is a standby.

    Args:
        settings: settings of the demo.
        ratings: the ratings.
        forks: the processes.
        console: terminal.
    """

    def __init__(self, settings: Settings, ratings: Ratings, forks: Forks, console: Console) -> None:
        self._settings, self._ratings, self._forks, self._console = settings, ratings, forks, console
        self._goals = [int(share * settings.num_batches) for share in KILLS]
        self._arrived: c_int64 = RawValue(c_int64, settings.every)  # for the first version
        self._num_jobs = 0
        self._standbys: set[int] = set()
        self._trainer = 0
        self._trained = 0
        self._is_killed = False
        self._story = Story()

    def run(self) -> Story:
        """Run all processes to their end; return what happened."""
        self._forks.start("predictor", serve, self._settings, self._ratings)
        self._start_job()
        for event in self._forks.events():
            match event:
                case {"event": "following", "job": job} if job != self._trainer:
                    self._standbys.add(job)
                    self._arrived.value = self._settings.num_batches
                case {"event": "trained", "job": job, "batches": batches} if job == self._trainer:
                    self._trained = batches
                    self._kill_if_due()
                case {"event": "taken", "job": job, "batches": batches}:
                    self._take(job, batches)
                case {"event": "fenced"} if self._goals:
                    self._start_job()
                case {"event": "ended"}:
                    for standby in self._standbys:
                        self._kill(standby)
                case {"event": "applied"}:
                    self._story.applied.append(event)
                    if self._num_jobs == 1:  # a standby needs a stream
                        self._start_job()
        return self._story

    def _start_job(self) -> None:
        for rank in _RANKS:
            arguments = (self._settings, self._ratings, self._num_jobs, rank, self._arrived)
            self._forks.start(f"job-{self._num_jobs} rank {rank}", live, *arguments)
        self._num_jobs += 1

    def _kill(self, job: int) -> None:
        self._forks.kill(*[f"job-{job} rank {rank}" for rank in _RANKS])

    def _kill_if_due(self) -> None:
        """Kill the trainer between two versions, and start a job in its place."""
        is_due = self._goals and self._standbys and self._trained >= self._goals[0] + max(1, self._settings.every // 2)
        if self._is_killed or not is_due:
            return
        self._kill(self._trainer)
        self._is_killed = True
        del self._goals[0]
        self._console.print(f"killed job {self._trainer}, which had trained {self._trained:,} batches")
        if self._goals:
            self._arrived.value = self._goals[0]
            self._start_job()

    def _take(self, job: int, batches: int) -> None:
        kind = "killed" if self._is_killed else "false alarm"
        self._story.handovers.append(Handover(self._trainer, kind, self._trained, batches))
        self._console.print(f"job {job} took over at batch {batches:,}")
        self._standbys.discard(job)
        self._trainer, self._trained, self._is_killed = job, batches, False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Return 0 if the last trainer equals a run without interruption, and the predictor the trainer."""
    console = Console(highlight=False)
    try:
        settings = parse(arguments)
        renew(settings)
        np.lib.format.open_memmap(logits_path(settings), "w+", np.float32, (settings.num_batches * settings.batch,))
        with Forks(settings.work, LIMIT_SECONDS) as forks:
            import_early()
            ratings = load_ratings(settings.ratings)
            story = Director(settings, ratings, forks, console).run()
            cuts = [handover.batches for handover in story.handovers]
            for rank in _RANKS:
                name = f"without interruption rank {rank}"
                forks.start(name, train_without_interruption, settings, ratings, cuts, rank)
            for _ in forks.events():
                pass
        console.print(summary(settings, ratings, story))
        verified = verify_run(settings.work)
        compared = compare_digests(settings, story)
    except (ProcessFailedError, TablesDifferError, ValueError, OSError) as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("the demo was interrupted", file=sys.stderr)
        return 130
    console.print(f"[bold green]verified:[/] {verified}", soft_wrap=True)
    console.print(f"[bold green]verified:[/] {compared}", soft_wrap=True)
    return 0


def parse(arguments: Sequence[str] | None) -> Settings:
    """Return the settings from the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.movielens.failover", description="Kill trainers twice.")
    parser.add_argument("--out", type=Path, default=Path("failover-output"), help="folder to write to; it is replaced")
    parser.add_argument("--ratings", type=int, help="number of ratings to use, oldest first")
    parser.add_argument("--batch", type=int, help="ratings per training batch, all ranks together")
    parser.add_argument("--every", type=int, help="batches per version")
    parser.add_argument("--silence", type=float, help="seconds without a sign of the trainer before a takeover")
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    if "silence" in given:
        given["silence_seconds"] = given.pop("silence")
    return Settings(**given)


def compare_digests(settings: Settings, story: Story) -> str:
    """Compare rows and states at each takeover and at the end with the run without interruption; return a summary.

    Raises:
        TablesDifferError: if they differ.
    """
    num_compared = 0
    for rank in _RANKS:
        without_interruption = digests_path(settings, "without-interruption", rank)
        expected = json.loads(without_interruption.read_text())
        for path in sorted({*settings.work.glob(f"digests-*-{rank}.json")} - {without_interruption}):
            for batches, digest in json.loads(path.read_text()).items():
                if expected.get(batches) != digest:
                    raise TablesDifferError(f"{path.stem} differs after {batches} batches")
                num_compared += rank == 0
    if num_compared != len(story.handovers) + 1:
        raise TablesDifferError(f"{num_compared} states were compared, not {len(story.handovers) + 1}")
    return (
        f"rows and optimizer states at {len(story.handovers)} takeovers and at the end equal those of a run without "
        "interruption bit for bit"
    )


def summary(settings: Settings, ratings: Ratings, story: Story) -> Table:
    """Return the table that the demo prints at its end.

    Raises:
        TablesDifferError: if the predictor had to start again from a snapshot.
    """
    if resyncs := story.applied[-1]["resyncs"]:
        raise TablesDifferError(f"the predictor resynced {resyncs} times")
    kinds = [event["kind"] for event in story.applied]
    used = slice(settings.warmup_batches * settings.batch, settings.num_batches * settings.batch)
    labels = ratings.labels[used].numpy()
    table = Table(show_header=False, title=f"MovieLens-100K, {len(labels):,} ratings after the warm-up")
    for justify in ("left", "right", "right"):
        table.add_column(justify=justify)
    table.add_row("versions applied", f"{kinds.count('snapshot')} snapshot", f"{kinds.count('delta'):,} deltas")
    table.add_row("generations", f"{story.applied[-1]['generation']}", "0 resyncs", end_section=True)
    inside, between = story.gaps()
    # A trainer that took over after the last batch has no version to publish.
    waits = [f"no version for {gap:.2f} s" for gap in between]
    waits += ["no later version"] * (len(story.handovers) - len(waits))
    for each, wait in zip(story.handovers, waits, strict=True):
        again = f"{max(0, each.trained - each.batches)} batches again"
        table.add_row(f"job {each.job}: {each.kind} at batch {each.trained:,}", again, wait)
    p50, largest = 1000 * float(np.median(inside)), 1000 * max(inside)
    table.add_row("between other versions", f"p50 {p50:.0f} ms", f"max {largest:.0f} ms", end_section=True)
    paths = {"trainers": logits_path(settings), "predictor": settings.work / "fresh-logits.npy"}
    for label, path in paths.items():
        logits = np.load(path)[used]
        loss = (np.logaddexp(0, logits) - labels * logits).mean()
        table.add_row(label, f"log loss {loss:.4f}", "")
    return table


if __name__ == "__main__":
    sys.exit(main())
