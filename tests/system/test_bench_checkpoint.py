"""The checkpoint benchmark, at a tiny size."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench_checkpoint import main, markdown, run
from tests.ranks import RankPool


def test_the_measured_sizes_are_right(two_ranks: RankPool) -> None:
    results = run(two_ranks, rows=4000, dim=8, shares=[0.05, 0.5], repeats=1)
    assert [(each.mode.name, each.share) for each in results] == [
        ("ID_ONLY", 0.05),
        ("ID_ONLY", 0.5),
        ("EMBEDDING", 0.05),
        ("EMBEDDING", 0.5),
    ]
    assert [each.rows for each in results] == [400, 4000, 400, 4000]
    # the cost per row without the cost per rank: its id, and its old state in modes that keep it
    costs = [(more.tracker_bytes - less.tracker_bytes) / 3600 for less, more in (results[:2], results[2:])]
    assert 4 <= costs[0] < 5
    assert 36 <= costs[1] < 37
    assert len(markdown(results).splitlines()) == 2 + len(results)


def test_the_command_writes_a_table(tmp_path: Path) -> None:
    target = tmp_path / "table.md"
    assert main(["--rows", "400", "--dim", "4", "--shares", "0.5", "--repeats", "1", "--markdown", str(target)]) == 0
    assert "| `EMBEDDING` | 50% | 400 |" in target.read_text()
