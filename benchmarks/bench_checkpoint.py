"""Size and time that the tracker adds to a checkpoint: ``python -m benchmarks.bench_checkpoint --markdown -``.

Two ranks train a row-wise table on random ids until a given share of its rows is pending for two consumers at the same
position. Then ``torch.distributed.checkpoint`` saves the model with the tracker, and the model alone. A second tracker
restores the state and must have exactly the same pending rows. It needs a checkout, because it uses the tests' ranks.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from delta_tracker import TrackingMode
from tests.ranks import RankPool

_WORLD_SIZE = 2
_MODES = (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING)


@dataclass(frozen=True, slots=True)
class Figures:
    """Results for one mode and one share of pending rows, over all ranks.

    Args:
        mode: tracking mode.
        share: share of the table's rows that is pending.
        rows: number of pending rows, summed over the consumers.
        tracker_bytes: bytes that the tracker adds to the checkpoint.
        model_bytes: bytes of the checkpoint of the model alone.
        state_seconds: ``tracker.state_dict()``, the slowest rank.
        with_seconds: ``dcp.save`` of model and tracker, the slowest rank, median.
        model_seconds: ``dcp.save`` of the model alone, the slowest rank, median.
        load_seconds: load of the tracker's state, the slowest rank.
    """

    mode: TrackingMode
    share: float
    rows: int
    tracker_bytes: int
    model_bytes: int
    state_seconds: float
    with_seconds: float
    model_seconds: float
    load_seconds: float

    @property
    def bytes_per_row(self) -> float:
        """Bytes in the checkpoint per pending row of a consumer."""
        return self.tracker_bytes / max(1, self.rows)


def run(ranks: RankPool, *, rows: int, dim: int, shares: Sequence[float], repeats: int) -> list[Figures]:
    """Measure every mode and share.

    Raises:
        AssertionError: if a restored tracker has other pending rows, or the tracker adds more bytes than its rows need.
    """
    results = []
    for mode in _MODES:
        for share in shares:
            folder = Path(tempfile.mkdtemp())
            try:
                said = ranks.run(
                    "tests.system.checkpoint_cost_cases:measure",
                    timeout_seconds=600,
                    path=str(folder),
                    rows=rows,
                    dim=dim,
                    share=share,
                    mode=mode.value,
                    repeats=repeats,
                )
                sizes = {name: _folder_bytes(folder / name) for name in ("model0", "both0")}
            finally:
                shutil.rmtree(folder)
            figures = Figures(
                mode,
                share,
                rows=sum(int(answer["rows"]) for answer in said),
                tracker_bytes=sizes["both0"] - sizes["model0"],
                model_bytes=sizes["model0"],
                **{name: max(answer[name] for answer in said) for name in said[0] if name.endswith("_seconds")},
            )
            # Four bytes per id, the old row in EMBEDDING mode, and per rank a header and the metadata of DCP.
            needed = 4 + (dim * 4 if mode is TrackingMode.EMBEDDING else 0)
            assert figures.tracker_bytes <= figures.rows * needed + _WORLD_SIZE * 16_384, figures
            results.append(figures)
    return results


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def markdown(results: Sequence[Figures]) -> str:
    """Return a table of the figures."""
    lines = [
        (
            "| mode | pending | rows x consumers | bytes a row | tracker / model bytes | `state_dict()` |"
            " save with tracker | save without | load of the tracker |"
        ),
        "|---" * 9 + "|",
    ]
    lines += [
        f"| `{each.mode.name}` | {each.share:.0%} | {each.rows:,} | {each.bytes_per_row:.1f} |"
        f" {each.tracker_bytes / each.model_bytes:.1%} | {each.state_seconds * 1e3:.0f} ms |"
        f" {each.with_seconds * 1e3:.0f} ms | {each.model_seconds * 1e3:.0f} ms | {each.load_seconds * 1e3:.0f} ms |"
        for each in results
    ]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_checkpoint", description="Cost of a checkpoint.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--dim", type=int, default=64, help="columns of the table, float32")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.1, 0.5], help="shares of pending rows")
    parser.add_argument("--repeats", type=int, default=5, help="number of saves of each kind")
    parser.add_argument("--markdown", default="-", help="file to write the table to; - is standard output")
    given = parser.parse_args(arguments)
    pool = RankPool(_WORLD_SIZE)
    try:
        results = run(pool, rows=given.rows, dim=given.dim, shares=given.shares, repeats=given.repeats)
    finally:
        pool.stop()
    if given.markdown == "-":
        sys.stdout.write(markdown(results))
    else:
        Path(given.markdown).write_text(markdown(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
