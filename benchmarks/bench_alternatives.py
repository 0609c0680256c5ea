"""What a user would build instead of this library, side by side: ``python -m benchmarks.bench_alternatives``.

One trainer and one predictor, each a process with one torch thread on one host, and a table that the trainer sends in
five ways: this library; ``torch.save`` and ``dcp.async_save`` of the whole table; TorchRec's tracker and a safetensors
file for each delta; rows set in Redis by the trainer. Each sends a version after the same number of batches, and each
predictor looks for news every millisecond. Needs redis-server.

Freshness is the time from the end of a batch until the predictor serves a row that the batch changed, for every batch.
The predictor's last table is compared with the trainer's, bit for bit.

In further runs the trainer is killed with SIGKILL up to 20 ms after a batch that begins a version. Then it is started
again from a checkpoint that is older than the predictor's rows, trains other ids, and sends two versions. ``torn``
counts the kills after which the predictor's table was equal to the trainer's after no batch. ``wrong rows`` are rows in
which the predictor differs from the restarted trainer after its last version.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.alternatives.receivers import RECEIVERS, Receiver
from benchmarks.alternatives.senders import SENDERS, Clock
from benchmarks.alternatives.trainer import Settings, train
from benchmarks.harness import Report, Sample, parser
from benchmarks.workloads import Trainer, one_rank, tables
from tests.servers import free_ports, redis_server

_FQN = "ebc.embedding_bags.t0"
_UNTRACKED = "no tracking"
_QUIET_SECONDS = 1.0  # a predictor that showed nothing new for so long has all that was sent
_KILL_SECONDS = 0.02


@contextmanager
def _place(way: str, folder: Path) -> Iterator[str]:
    """Yield an empty place for a way."""
    if way == "rows to Redis":
        (port,) = free_ports(1)
        with redis_server(port) as url:
            yield url
    else:
        yield str(folder / "place")


def _started(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.alternatives.{module}", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603  our own


def _wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", f"{process.args!r}: {line!r}"


def _go(process: subprocess.Popen[str], line: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def _result(process: subprocess.Popen[str]) -> object:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, f"{process.args!r}: exit code {process.returncode}"
    return json.loads(output.splitlines()[-1])


def _freshness(clock: Clock, seen: Sequence[tuple[float, float]], interval: int) -> np.ndarray:
    """Return the seconds from each batch until it was served, ``[batches]``, without the first and last intervals."""
    times, values = clock.times[:, 0], clock.times[:, 1]
    served = {value: moment for moment, value in seen}
    moments = np.full(len(times), np.nan)
    for batch, value in enumerate(values.tolist()):
        if value in served:
            moments[batch] = served[value]
    # A batch is served as soon as a later one is.
    moments = np.minimum.accumulate(np.where(np.isnan(moments), np.inf, moments)[::-1])[::-1]
    found = (moments - times)[interval + 1 : -interval]
    assert np.isfinite(found).all(), "a batch was never served"
    assert (found > 0).all(), "a batch was served before it was trained"
    return found


def _run(settings: Settings) -> dict[str, object]:
    """Train and serve without a fault, and return the figures."""
    with ExitStack() as stack:
        trainer = _started("trainer", settings.text())
        stack.callback(trainer.kill)
        _wait_ready(trainer)
        predictor = None
        if settings.way != _UNTRACKED:
            served = Path(settings.folder) / "served.npy"
            rest = (_FQN, str(settings.num_rows), str(settings.dim), str(served))
            predictor = _started("predictor", settings.way, settings.place, *rest)
            stack.callback(predictor.kill)
            _wait_ready(predictor)
        _go(trainer)
        figures: dict[str, object] = dict(_result(trainer))  # type: ignore[call-overload]
        if predictor is not None:
            clock = Clock(settings.clock)
            _go(predictor, repr(float(clock.times[-1, 1])))
            figures["freshness"] = _freshness(clock, _result(predictor), settings.interval).tolist()  # type: ignore[arg-type]
            assert np.array_equal(np.load(served), np.load(settings.table)), f"{settings.way}: wrong rows at the end"
        return figures


def _settle(receiver: Receiver, row: int) -> float:
    """Wait until a receiver shows nothing new, and return the value of a row."""
    value, since = receiver.value(row), time.monotonic()
    while time.monotonic() - since < _QUIET_SECONDS:
        receiver.look()
        if (now := receiver.value(row)) != value:
            value, since = now, time.monotonic()
        time.sleep(0.01)
    return value


def _killed(settings: Settings, kill_at: int, delay: float) -> dict[str, float]:
    """Kill the trainer, restart it, and return what the predictor lost."""
    with ExitStack() as stack:
        trainer = _started("trainer", settings.text())
        stack.callback(trainer.kill)
        _wait_ready(trainer)
        receiver = RECEIVERS[settings.way](settings.place, _FQN, settings.num_rows, settings.dim)
        stack.callback(receiver.close)
        _settle(receiver, settings.num_rows - 1)
        clock = Clock(settings.clock)
        _go(trainer)
        while clock.times[kill_at, 0] == 0:
            assert trainer.poll() is None, f"{trainer.args!r}: exit code {trainer.returncode}"
            receiver.look()
            time.sleep(0.0005)
        time.sleep(delay)
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        value = _settle(receiver, settings.num_rows - 1)
        batches = np.flatnonzero(clock.times[:, 1] == value)
        batch = int(batches[-1]) if len(batches) else -1
        is_torn = batch < 0 or not torch.equal(receiver.table(), _reference(settings, batch))
        late = clock.batch - max(batch, 0)
        again = replace(
            settings,
            attempt=1,
            first=settings.checkpoint_at + 1,
            last=kill_at + settings.interval,
            checkpoint_at=0,
        )
        restarted = _started("trainer", again.text())
        stack.callback(restarted.kill)
        _wait_ready(restarted)
        _go(restarted)
        _result(restarted)
        _settle(receiver, settings.num_rows - 1)
        wanted = torch.from_numpy(np.load(again.table))
        wrong = int((receiver.table() != wanted).any(1).sum())
        return {"torn": float(is_torn), "batches": float(late), "wrong rows": float(wrong)}


def _reference(settings: Settings, batch: int) -> torch.Tensor:
    """Return the trainer's table after a batch, without a tracker."""
    trainer = Trainer(tables(1, settings.num_rows, settings.dim))
    for number in range(1, batch + 1):
        train(trainer, settings, number)
    table: torch.Tensor = trainer.model.state_dict()[f"{_FQN}.weight"].local_tensor()
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Run all ways in turn, and write the table and the picture."""
    options = parser("bench_alternatives", (__doc__ or "").partition("\n")[0])
    options.add_argument("--kills", type=int, help="number of kills of each way")
    chosen = options.parse_args(argv)
    repeats = chosen.repeats or (1 if chosen.tiny else 3)
    kills = (1 if chosen.tiny else 5) if chosen.kills is None else chosen.kills
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=chosen.work) as root, one_rank():
        base = Settings(
            way="",
            place="",
            folder="",
            num_rows=2_000 if chosen.tiny else 1_000_000,
            dim=64,
            num_ids=100 if chosen.tiny else 4096,
            products=1 if chosen.tiny else 60,
            interval=5 if chosen.tiny else 25,
            last=15 if chosen.tiny else 400,
        )
        report = Report(
            name="bench_alternatives",
            settings={
                "table": f"{base.num_rows} x {base.dim} fp32",
                "lookups per batch": base.num_ids,
                "batches": base.last,
                "batches per version": base.interval,
                "poll": "1 ms",
                "repeats": repeats,
                "kills": kills,
                "rows with kills": base.num_rows // 5,
            },
            columns=[
                "way",
                "freshness p50, ms",
                "p99, ms",
                "MB per version",
                "step / untracked",
                "after kill -9: torn",
                "batches behind",
                "wrong rows after a restart",
            ],
        )
        found = _measure(base, Path(root), repeats)
        lost = _kill(replace(base, num_rows=base.num_rows // 5, last=base.last - 1), Path(root), kills)
    _write(report, found, lost)
    if not chosen.tiny:
        _draw(found, chosen.out / "bench_alternatives.png")
    report.finish(chosen.out)


def _measure(base: Settings, root: Path, repeats: int) -> dict[str, list[dict[str, object]]]:
    """Run all ways without faults, in rounds of random order."""
    found: dict[str, list[dict[str, object]]] = {way: [] for way in SENDERS}
    order = random.Random(0)  # noqa: S311  not for security
    for number in range(repeats):
        for way in order.sample(list(SENDERS), len(SENDERS)):
            with tempfile.TemporaryDirectory(dir=root) as folder, _place(way, Path(folder)) as place:
                figures = _run(replace(base, way=way, place=place, folder=folder))
            found[way].append(figures)
            sys.stderr.write(f"{number} {way}: step {float(figures['step']) * 1e3:.1f} ms\n")  # type: ignore[arg-type]
    return found


def _kill(base: Settings, root: Path, kills: int) -> dict[str, list[dict[str, float]]]:
    """Kill the trainer of each way."""
    lost: dict[str, list[dict[str, float]]] = {way: [] for way in RECEIVERS}
    order = random.Random(1)  # noqa: S311  not for security
    moments = [
        (base.interval * order.randrange(2, max(3, base.last // base.interval)), order.uniform(0, _KILL_SECONDS))
        for _ in range(kills)
    ]
    for way, losses in lost.items():
        for kill_at, delay in moments:
            with tempfile.TemporaryDirectory(dir=root) as folder, _place(way, Path(folder)) as place:
                settings = replace(
                    base,
                    way=way,
                    place=place,
                    folder=folder,
                    checkpoint_at=kill_at - base.interval - base.interval // 2,
                )
                losses.append(_killed(settings, kill_at, delay))
            sys.stderr.write(f"{way}: {losses[-1]}\n")
    return lost


def _sample(runs: Sequence[Mapping[str, object]], figure: str) -> Sample:
    return Sample(tuple(float(run[figure]) for run in runs))  # type: ignore[arg-type]


def _write(
    report: Report, found: Mapping[str, list[dict[str, object]]], lost: Mapping[str, list[dict[str, float]]]
) -> None:
    """Add a line for each way."""
    untracked = _sample(found[_UNTRACKED], "step")
    versions = int(report.settings["batches"]) // int(report.settings["batches per version"])  # type: ignore[call-overload]
    for way, runs in found.items():
        step = _sample(runs, "step")
        ratios = Sample(tuple(own / base for own, base in zip(step.values, untracked.values, strict=True)))
        report.add(way, {"step": step})
        if way == _UNTRACKED:
            report.notes.append(f"A batch without tracking takes {untracked.text(1e3)} ms.")
            continue
        waits = [np.asarray(run["freshness"]) for run in runs]
        half, most = (Sample(tuple(float(np.quantile(each, q)) for each in waits)) for q in (0.5, 0.99))
        report.add(way, {"step": step, "p50": half, "p99": most, "bytes": _sample(runs, "bytes")})
        kills = lost[way]
        if kills:
            report.add(f"{way}, killed", {name: _sample(kills, name) for name in kills[0]})
        report.lines.append(
            [
                way,
                half.text(1e3, 0),
                most.text(1e3, 0),
                f"{_sample(runs, 'bytes').median / versions / 1e6:.2f}",
                ratios.text(1, 2),
                f"{sum(each['torn'] for each in kills):.0f} of {len(kills)}",
                f"{statistics.median(each['batches'] for each in kills):.0f}" if kills else "",
                f"{statistics.median(each['wrong rows'] for each in kills):,.0f}" if kills else "",
            ]
        )
    report.notes += [
        (
            "Freshness: from the end of a batch until a row that it changed is served, over all batches of a run. On"
            " average, a batch waits half an interval for its version. Medians (smallest-largest) of the repeats."
        ),
        "The first version, with all rows, is not counted in the MB.",
        (
            "Wrong rows: whole tables have none, because a restart sends all of them again. The other two would need"
            " that too: they do not know which rows the predictor has from after the checkpoint."
        ),
    ]


def _draw(found: Mapping[str, list[dict[str, object]]], path: Path) -> None:
    """Draw freshness and bytes."""
    import matplotlib as mpl  # noqa: PLC0415  slow to import, only needed here

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  as above

    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for way, runs in found.items():
        if way == _UNTRACKED:
            continue
        waits = np.sort(np.concatenate([np.asarray(run["freshness"]) for run in runs]))
        share = np.arange(1, len(waits) + 1) / len(waits)
        axis.plot(waits * 1e3, share, label=way, linewidth=2.5 if way == "delta_tracker" else 1.5)
    axis.set_xlabel("time from the end of a batch until its rows are served, ms")
    axis.set_ylabel("share of the batches")
    axis.set_xlim(left=0)
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
