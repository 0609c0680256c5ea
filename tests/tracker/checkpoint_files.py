"""Cell-by-cell comparison of the rows pending at a save with those pending after a restore.

The cases in ``tests/tracker/checkpointing_cases.py`` write the files.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch


def load(path: Path, kind: str, world_size: int) -> list[dict[str, Any]]:
    """Load what each rank held, by rank."""
    return [torch.load(path / f"{kind}-{rank}of{world_size}.pt") for rank in range(world_size)]


def compare(saved: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> dict[str, int]:
    """Check that each loaded rank has the pending rows, values and ages of the saved blocks that overlap its own."""
    counts = dict.fromkeys(("rows", "aged", "states"), 0)
    tables = [fqn for fqn in saved[0] if fqn != "num_batches"]
    for (rank, here), fqn, name in itertools.product(enumerate(loaded), tables, ("a", "b", "c")):
        assert here["num_batches"] == saved[0]["num_batches"]
        mine = here[fqn]
        sources = [part[fqn] for part in saved]
        if sources[0]["replicated"]:
            sources = [sources[rank if mine["replicated"] and rank < len(saved) else 0]]
        columns = columns_of(mine)
        expected: dict[int, tuple[int, dict[int, float]]] = {}
        for source in sources:
            shared = set(columns_of(source)) & set(columns)
            if name not in source or not shared:
                continue
            rows = source[name]
            for place, row in enumerate(rows["ids"].tolist()):
                if not mine["rows"][0] <= row < mine["rows"][1]:
                    continue
                age, values = expected.setdefault(row, (0, {}))
                if rows["states"] is not None:
                    assert rows["known"][place]
                    states = rows["states"][place].tolist()
                    held = (
                        columns_of(source)
                        if len(states) == len(columns_of(source))
                        else [c for c, _ in source["columns"]]
                    )
                    values.update(
                        {column: state for column, state in zip(held, states, strict=True) if column in shared}
                    )
                expected[row] = max(age, int(rows["ages"][place])), values
        found = mine.get(name, {"ids": torch.empty(0), "states": None, "ages": torch.empty(0)})
        assert found["ids"].tolist() == sorted(expected), (fqn, name, rank)
        for place, row in enumerate(sorted(expected)):
            age, values = expected[row]
            assert found["ages"][place] == age
            counts["rows"] += 1
            counts["aged"] += age > 0
            if found["states"] is not None:
                states = found["states"][place].tolist()
                weights = mine["weights"][row - mine["rows"][0]].tolist()
                held = columns if len(states) == len(columns) else [first for first, _ in mine["columns"]]
                assert states == [values.get(column, weights[columns.index(column)]) for column in held]
                counts["states"] += 1
    return counts


def columns_of(block: dict[str, Any]) -> list[int]:
    return [column for start, stop in block["columns"] for column in range(start, stop)]


def weights(parts: list[dict[str, Any]], fqn: str) -> torch.Tensor:
    """Return the whole table."""
    sizes = [
        max(max(part[fqn]["rows"]) for part in parts),
        max(max(columns_of(part[fqn]), default=0) for part in parts) + 1,
    ]
    table = torch.zeros(sizes)
    for part in parts:
        table[slice(*part[fqn]["rows"]), columns_of(part[fqn])] = part[fqn]["weights"]
    return table


def same_weights(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> bool:
    """Return whether the ranks of both hold the same tables."""
    tables = set(left[0]) - {"num_batches"}
    return all(torch.equal(weights(left, fqn), weights(right, fqn)) for fqn in tables)
