"""Cases for how many calls a warm publish and a warm sync make."""

from __future__ import annotations

from pathlib import Path

from benchmarks.count_calls import count_calls, total


def counted(rank: int, world_size: int, root: str) -> dict[str, int]:
    """Calls of one publish and of one sync."""
    assert (rank, world_size) == (0, 1)
    return {name: total(calls) for name, calls in count_calls(Path(root), repeats=5).items()}
