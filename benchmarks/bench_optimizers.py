"""Size of deltas by optimizer: ``python -m benchmarks.bench_optimizers``.

One table is trained with Zipf-distributed ids, and a version is published every ten batches. An optimizer that keeps
momentum or averages, or that decays weights, also moves rows that the batch did not look up, if the gradients of the
table are dense. At the end, a predictor must have the trainer's table bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam
from torchrec.optim import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import Report, Sample, parser
from benchmarks.ids import zipf_ids
from benchmarks.workloads import Table, bags, one_rank, shard
from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Storage

_DIM, _BATCHES = 16, 10
_Training: TypeAlias = tuple[nn.Module, Callable[[Tensor], object]]  # a model, and a function that trains a batch


@dataclass(frozen=True, slots=True)
class _Way:
    """A kind of gradients and an optimizer."""

    gradients: str
    optimizer: str
    build: Callable[[Table], _Training]


def _plain(
    optimizer: Callable[..., Optimizer], table: Table, *, is_sparse: bool
) -> tuple[nn.Module, Callable[[Tensor], None]]:
    model = nn.ModuleDict({"t": nn.EmbeddingBag(table.num_rows, table.dim, mode="sum", sparse=is_sparse)})
    made = optimizer(model.parameters(), lr=0.001)

    def train(ids: Tensor) -> None:
        made.zero_grad()
        model["t"](ids[:, None]).sum().backward()
        made.step()

    return model, train


def _fused(optimizer: type[Optimizer], table: Table) -> _Training:
    model = shard(nn.ModuleDict({"ebc": bags([table], optimizer)}), [table])

    def train(ids: Tensor) -> None:
        features = KeyedJaggedTensor([table.name], ids, lengths=torch.ones_like(ids))
        model.module["ebc"](features).values().sum().backward()

    return model, train


def _ways() -> Iterator[_Way]:
    optimizer: Callable[..., Optimizer]
    for name, optimizer in (
        ("SGD", SGD),
        ("SGD, momentum", partial(SGD, momentum=0.9)),
        ("SGD, weight decay", partial(SGD, weight_decay=1e-4)),
        ("Adagrad", Adagrad),
        ("Adam", Adam),
        ("AdamW", AdamW),
    ):
        yield _Way("dense", name, partial(_plain, optimizer, is_sparse=False))
    for name, optimizer in (
        ("SGD", SGD),
        ("SGD, momentum", partial(SGD, momentum=0.9)),
        ("Adagrad", Adagrad),
        ("SparseAdam", SparseAdam),
    ):
        yield _Way("sparse", name, partial(_plain, optimizer, is_sparse=True))
    for name, optimizer in (("SGD", SGD), ("Adagrad", Adagrad), ("RowWiseAdagrad", RowWiseAdagrad)):
        yield _Way("fused, TorchRec", name, partial(_fused, optimizer))


def _shares(way: _Way, table: Table, num_versions: int, batch: int) -> tuple[list[float], list[float]]:
    """Return the share of the table's rows that each version has, and the share that its batches looked up."""
    torch.manual_seed(0)
    generator, storage = torch.Generator().manual_seed(0), Storage("memory://")
    model, train = way.build(table)
    found: list[float] = []
    looked_up: list[float] = []
    with ModelDeltaTracker(model) as tracker, Publisher(tracker, storage) as publisher:
        (fqn,) = tracker.tables
        served_table = torch.zeros(table.num_rows, table.dim)
        predictor = Predictor({fqn: served_table}, storage)
        publisher.snapshot()
        for _ in range(num_versions):
            ids = [zipf_ids(table.num_rows, batch, generator) for _ in range(_BATCHES)]
            for each in ids:
                train(each)
                tracker.step()
            found.append(publisher.publish().num_rows / table.num_rows)
            looked_up.append(len(torch.cat(ids).unique()) / table.num_rows)  # type: ignore[no-untyped-call]
        predictor.sync()
        assert torch.equal(served_table, tracker.read_rows(fqn)), f"{way} is not served as it was trained"
    return found, looked_up


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check the predictors, and write the results."""
    options = parser("bench_optimizers", __doc__ or "").parse_args(argv)
    table, num_versions = Table("t", 2_000 if options.tiny else 100_000, _DIM), 5 if options.tiny else 20
    batch = 64 if options.tiny else 2_048
    report = Report(
        name="bench_optimizers",
        settings={"rows": table.num_rows, "ids of a batch": batch, "batches of a version": _BATCHES},
        columns=(
            "gradients",
            "optimizer",
            "rows looked up, %",
            "rows of version 1, %",
            f"of version {num_versions}, %",
        ),
    )
    with one_rank():
        for way in _ways():
            found, looked_up = _shares(way, table, num_versions, batch)
            report.add(f"{way.gradients}, {way.optimizer}", {"share": Sample(tuple(found))})
            shares = (looked_up[-1], found[0], found[-1])
            report.lines.append((way.gradients, way.optimizer, *(f"{100 * each:.1f}" for each in shares)))
    report.notes.append(
        "Shares of the table: rows that the batches of the last version looked up, and rows of two deltas."
    )
    report.finish(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
