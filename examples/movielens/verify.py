"""Check that every table of the predictor equals the trainer's, bit for bit.

``python -m examples.movielens.verify OUT`` repeats the check on a finished run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.movielens.settings import Settings

Table = NDArray[Any]


class TablesDifferError(Exception):
    """The predictor's tables differ from the trainer's."""


def verify_run(work: Path) -> str:
    """Compare the tables in a work folder. Return a line that summarizes the comparison.

    Raises:
        TablesDifferError: if tables differ; it names each table and the difference.
    """
    trainer = assemble(work)
    predictor = {path.stem.split("@")[1]: np.load(path) for path in sorted(work.glob("predictor@*.npy"))}
    compare(trainer, predictor)
    num_rows, num_bytes = (sum(sizes) for sizes in zip(*((len(t), t.nbytes) for t in trainer.values()), strict=True))
    return (
        f"all {len(trainer)} predictor tables equal the trainer's bit for bit "
        f"({num_rows:,} rows, {num_bytes:,} bytes compared)"
    )


def compare(trainer: Mapping[str, Table], predictor: Mapping[str, Table]) -> None:
    """Compare tables bit for bit, so that 0.0 is not -0.0 and a NaN equals itself.

    Raises:
        TablesDifferError: if a table differs or is missing, or if there are no tables.
    """
    problems = [f"{name} is only in one of the two" for name in sorted(trainer.keys() ^ predictor.keys())]
    for name in sorted(trainer.keys() & predictor.keys()):
        ours, theirs = trainer[name], predictor[name]
        if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
            problems.append(f"{name} is {ours.shape} {ours.dtype} and {theirs.shape} {theirs.dtype}")
        elif rows := int((_bytes(ours) != _bytes(theirs)).any(axis=1).sum()):
            problems.append(f"{name} differs in {rows:,} of {len(ours):,} rows")
    if not trainer:
        problems.append("there is no table to compare")
    if problems:
        raise TablesDifferError("the predictor's tables are not the trainer's: " + "; ".join(problems))


def assemble(work: Path) -> dict[str, Table]:
    """Assemble each trainer table from the shards of the ranks.

    Raises:
        TablesDifferError: if the shards of a table overlap or leave a gap.
    """
    shards: dict[str, list[tuple[int, int, Table]]] = {}
    for path in sorted(work.glob("shard@*.npy")):
        _, name, row, column, _ = path.stem.split("@")
        shards.setdefault(name, []).append((int(row), int(column), np.load(path)))
    return {name: _joined(name, blocks) for name, blocks in shards.items()}


def _joined(name: str, blocks: list[tuple[int, int, Table]]) -> Table:
    shape = tuple(max(block[axis] + block[2].shape[axis] for block in blocks) for axis in (0, 1))
    table = np.empty(shape, blocks[0][2].dtype)
    times_written = np.zeros(shape, dtype=np.int8)
    for row, column, values in blocks:
        place = np.s_[row : row + values.shape[0], column : column + values.shape[1]]
        table[place] = values
        times_written[place] += 1
    if (times_written != 1).any():
        raise TablesDifferError(f"the shards of {name} do not fit together")
    return table


def _bytes(table: Table) -> NDArray[np.uint8]:
    return np.ascontiguousarray(table).view(np.uint8).reshape(len(table), -1)


if __name__ == "__main__":
    try:
        print(verify_run(Settings.load(Path(sys.argv[1])).work))
    except TablesDifferError as error:
        sys.exit(str(error))
