"""Cases that count the calls of a warm publish and a warm sync."""

from __future__ import annotations

from pathlib import Path

from benchmarks.count_calls import count_calls, total
from delta_tracker import TrackingMode


def counted(rank: int, world_size: int, root: str) -> dict[str, int]:
    """Count the calls of one publish and of one sync."""
    assert (rank, world_size) == (0, 1)
    return {name: total(calls) for name, calls in count_calls(Path(root), repeats=5).items()}


def counted_with_states(rank: int, world_size: int, root: str) -> dict[str, int]:
    """Count the calls of one publish, by the tracker's mode."""
    assert (rank, world_size) == (0, 1)
    return {
        mode.value: total(count_calls(Path(root) / mode.value, repeats=5, mode=mode)["publish"])
        for mode in (TrackingMode.ID_ONLY, TrackingMode.EMBEDDING)
    }
