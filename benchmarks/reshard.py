"""Save under one world size and plan, restore under another: ``python -m benchmarks.reshard --markdown -``.

Each journey trains on several ranks until every consumer has pending rows (committed, sealed and left out by top-k),
saves model and tracker with ``torch.distributed.checkpoint``, restores both under the next plan, and compares all
pending rows and values. It needs a checkout, because it uses the tests' ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_tracker import TrackingMode
from tests.ranks import RankPool
from tests.tracker.checkpoint_files import compare, load, same_weights

_CASES = "tests.tracker.checkpointing_cases"
_ROWS = (17, 10, 9)


@dataclass(frozen=True, slots=True)
class Stop:
    """World size and plan under which a journey saves or restores.

    Args:
        world_size: number of ranks.
        plan: description of the sharding plan.
        places: sharding and ranks of each table, in the notation of the test models.
    """

    world_size: int
    plan: str
    places: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.world_size} x {self.plan}"


@dataclass(frozen=True, slots=True)
class Leg:
    """Results of a save and a restore.

    Args:
        start: world size and plan of the save.
        stop: world size and plan of the restore.
        rows: number of compared pending rows, over all consumers and ranks.
        aged: number of them that top-k had left out.
        states: number of compared old values.
        messages: exchanges between ranks for the tracker, in addition to those of DCP for the model.
        num_bytes: bytes sent in these exchanges by the rank that sent most.
        plan_bytes: growth of DCP's own messages, its plan, in bytes.
    """

    start: Stop
    stop: Stop
    rows: int
    aged: int
    states: int
    messages: int
    num_bytes: int
    plan_bytes: int


@dataclass(frozen=True, slots=True)
class Journey:
    """A model that is saved and restored one or more times.

    Args:
        stops: world sizes and plans, in order.
        mode: tracking mode.
        module: "EC" or "EBC".
        kernel: "fused", or "dense" with an ordinary optimizer.
        how: "sync" or "async" save.
    """

    stops: tuple[Stop, ...]
    mode: TrackingMode
    module: str = "EC"
    kernel: str = "fused"
    how: str = "sync"

    def __str__(self) -> str:
        return f"{self.module} {self.kernel} {self.mode.name}: {' to '.join(map(str, self.stops))} {self.how}"

    def run(self, ranks: Mapping[int, RankPool], folder: Path) -> list[Leg]:
        """Train, then save and restore at each stop.

        Raises:
            AssertionError: if pending rows or values differ after a restore.
        """
        path = folder / "0"
        path.mkdir()
        start, legs = self.stops[0], []
        said = ranks[start.world_size].run(f"{_CASES}:saving", **self._arguments(start, path), how=self.how)
        assert all(all(counts) for counts in zip(*(answer["pending"] for answer in said), strict=True)), said
        for number, stop in enumerate(self.stops[1:], 1):
            again = folder / str(number) if number + 1 < len(self.stops) else None
            if again is not None:
                again.mkdir()
            then = ranks[stop.world_size].run(
                f"{_CASES}:loading", **self._arguments(stop, path), again=None if again is None else str(again)
            )
            saved, loaded = load(path, "saved", start.world_size), load(path, "loaded", stop.world_size)
            assert same_weights(saved, loaded)
            legs.append(
                Leg(
                    start,
                    stop,
                    **compare(saved, loaded),
                    messages=max(answer["own messages"] for answer in said),
                    num_bytes=max(answer["own bytes"] for answer in said),
                    plan_bytes=max(answer["plan bytes"] for answer in said),
                )
            )
            start, said, path = stop, then, again or path
        return legs

    def _arguments(self, stop: Stop, path: Path) -> dict[str, Any]:
        tables = [
            {"name": f"t{place}", "rows": rows, "sharding": sharding}
            for place, (rows, sharding) in enumerate(zip(_ROWS, stop.places, strict=True))
        ]
        spec = {"tables": tables, "bag": self.module == "EBC", "kernel": self.kernel}
        return {"path": str(path), "spec": spec, "mode": self.mode.value}


def _row(world_size: int) -> Stop:
    return Stop(world_size, "ROW_WISE", ("row",) * 3)


def _column(world_size: int) -> Stop:
    last = world_size - 1
    return Stop(world_size, "COLUMN_WISE", (f"column:0,{last}", f"column:{last},0", "column:0,0"))


def _table(world_size: int) -> Stop:
    last = world_size - 1
    return Stop(world_size, "TABLE_WISE", (f"table:{last}", "table:0", f"table:{last}"))


_REPLICATED = Stop(2, "DATA_PARALLEL", ("data",) * 3)

JOURNEYS = (
    Journey((_row(2), _column(2)), TrackingMode.EMBEDDING),
    Journey((_column(2), _row(2)), TrackingMode.EMBEDDING, how="async"),
    Journey((_table(2), _row(2)), TrackingMode.MOMENTUM_DIFF),
    Journey((_row(2), _row(2)), TrackingMode.ROWWISE_ADAGRAD),
    Journey((_row(4), _table(1), _column(3)), TrackingMode.EMBEDDING),
    Journey((_column(2), _table(4)), TrackingMode.EMBEDDING, module="EBC", how="async"),
    Journey((_row(2), _table(2)), TrackingMode.MOMENTUM_LAST, module="EBC"),
    Journey((_table(2), _column(2)), TrackingMode.ID_ONLY, module="EBC"),
    Journey((_REPLICATED, _REPLICATED), TrackingMode.EMBEDDING, module="EBC", kernel="dense"),
    Journey((_row(2), _REPLICATED), TrackingMode.EMBEDDING, module="EBC", kernel="dense"),
    Journey((_REPLICATED, _column(2)), TrackingMode.ID_ONLY, module="EBC", kernel="dense"),
)


def markdown(results: Sequence[tuple[Journey, Sequence[Leg]]]) -> str:
    """Return the table of benchmarks/results/reshard.md."""
    lines = [
        (
            "| saved: ranks x plan | restored: ranks x plan | module, kernel, mode | pending rows, equal | of them left"
            " out by top-k | old values, equal | messages, bytes | DCP's plan |"
        ),
        "|---" * 8 + "|",
    ]
    for journey, legs in results:
        lines += [
            f"| {leg.start} | {leg.stop} | {journey.module} {journey.kernel} `{journey.mode.name}` | {leg.rows} |"
            f" {leg.aged} | {leg.states} | {leg.messages}, {leg.num_bytes} | +{-(-leg.plan_bytes // 1000)} kB |"
            for leg in legs
        ]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all journeys. Raises at the first difference."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description="Run the reshard table.")
    parser.add_argument("--markdown", default="-", help="file to write the table to; - is standard output")
    target = parser.parse_args(arguments).markdown
    pools = {size: RankPool(size) for size in (1, 2, 3, 4)}
    results = []
    try:
        for journey in JOURNEYS:
            sys.stderr.write(f"{journey}\n")
            with tempfile.TemporaryDirectory() as folder:
                results.append((journey, journey.run(pools, Path(folder))))
    finally:
        for pool in pools.values():
            pool.stop()
    if target == "-":
        sys.stdout.write(markdown(results))
    else:
        Path(target).write_text(markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
