"""Cost of tracking in a training step: ``python -m benchmarks.bench_step``.

The model is a DLRM with eight tables under DistributedModelParallel on one rank, with layers as wide as those of
MLPerf's DLRM. Two equal models, one of them with a tracker, train alternately step by step, so that other load on the
machine affects both. A turn is a number of steps of each model and a read of the tracker; then the models swap roles.
The read must return exactly the rows that were looked up.

On the CPU nothing waits for a device. Device syncs of recording are counted separately, on a simulated device
(:mod:`delta_tracker.monitor.device.syncs`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import add, truediv
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness import Figures, Report, Sample, interleaved, parser, timed
from benchmarks.stores import Ours, Store, Theirs, lookups
from benchmarks.workloads import Table, bags, one_rank, shard, tables, zipf_ids
from delta_tracker import ModelDeltaTracker, TopK, TrackingMode
from delta_tracker.monitor.default import metrics
from delta_tracker.monitor.device.syncs import SIMULATED, find_syncs, on_device

_NUM_DENSE = 13
_OFF, _THEIRS = "no tracker", "TorchRec, ID_ONLY"
_EMBEDDING = TrackingMode.EMBEDDING
_OURS: dict[str, tuple[TrackingMode, TopK | None]] = {
    "ID_ONLY": (TrackingMode.ID_ONLY, None),
    "EMBEDDING": (_EMBEDDING, None),
    "EMBEDDING, top 10 %": (_EMBEDDING, TopK(fraction=0.1)),
}
_NOTES = (
    (
        "The figure of a turn is the median of its steps plus a share of the read at its end. The table shows medians"
        " (smallest-largest) of the turns."
    ),
    (
        "Against no tracker: the median ratio of a step to the other model's step on the same batch, directly before or"
        " after it, plus the read's share."
    ),
    (
        "In the tracker: the mean of the metric record_seconds per step plus the read's share, absolute and relative to"
        " a step without tracker. It does not include finding the ids of a lookup, calling the hooks, and effects on"
        " the caches."
    ),
    "TorchRec's tracker does not support EMBEDDING mode for an EmbeddingBagCollection, and has no top-k.",
    "Syncs: number of waits for the device when recording one batch.",
)
Start = Callable[[DistributedModelParallel], tuple[Callable[[], object], "Read", Callable[[], object]]]
"""Attaches a tracker to a model. Returns functions to call after a step, to read, and to detach the tracker."""
Read = Callable[[], Mapping[str, Tensor]]


class Dlrm(nn.Module):
    """DLRM: a perceptron over the dot products of pooled embeddings and dense features.

    Args:
        table_set: the tables, all with the same number of columns.
        optimizer: optimizer of the tables, fused into the backward pass.
        shrink: divisor of the widths of the layers.
    """

    def __init__(
        self, table_set: Sequence[Table], optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, shrink: int = 1
    ) -> None:
        super().__init__()
        dim, num_vectors = table_set[0].dim, len(table_set) + 1
        self.ebc = bags(table_set, optimizer)
        self.bottom = _perceptron(_NUM_DENSE, 512 // shrink, 256 // shrink, dim)
        widths = (1024 // shrink, 1024 // shrink, 512 // shrink, 256 // shrink)
        self.top = _perceptron(dim + num_vectors * (num_vectors - 1) // 2, *widths, 1)
        self._pairs = torch.triu_indices(num_vectors, num_vectors, offset=1).unbind()

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Return ``[B]`` logits from ``[B, 13]`` dense features and the ids of each table."""
        below = self.bottom(dense)
        vectors = torch.cat([below, self.ebc(sparse).values()], dim=1).view(len(dense), -1, below.shape[1])
        left, right = self._pairs
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, left, right]
        logits: Tensor = self.top(torch.cat([below, products], dim=1)).squeeze(1)
        return logits


def _perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _Trained:
    """A model with its optimizer.

    Args:
        table_set: the tables.
    """

    def __init__(self, table_set: Sequence[Table]) -> None:
        torch.manual_seed(0)
        self.model = shard(Dlrm(table_set), table_set)
        dense = [each for name, each in self.model.named_parameters() if "ebc" not in name]
        self._optimizer = torch.optim.SGD(dense, lr=0.01)

    def step(self, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor) -> None:
        """Train one batch."""
        self._optimizer.zero_grad()
        logits = self.model(dense, sparse)
        functional.binary_cross_entropy_with_logits(logits, labels).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


class _Turns:
    """Two equal models, trained in turns.

    Args:
        table_set: the tables.
        batch_size: number of samples of a step.
        num_steps: number of steps of a turn.
    """

    def __init__(self, table_set: Sequence[Table], batch_size: int, num_steps: int) -> None:
        self._models = [_Trained(table_set), _Trained(table_set)]
        generator = torch.Generator().manual_seed(1)
        self._dense = torch.rand(batch_size, _NUM_DENSE, generator=generator)
        self._labels = torch.randint(2, (batch_size,), generator=generator).float()
        self._sparse = [
            lookups({table.name: zipf_ids(table.num_rows, batch_size, generator) for table in table_set})
            for _ in range(num_steps)
        ]
        self._expected = {
            f"ebc.embedding_bags.{table.name}": torch.cat(
                [batch[table.name].values() for batch in self._sparse]
            ).unique()  # type: ignore[no-untyped-call]
            for table in table_set
        }

    def turn(self, start: Start) -> Figures:
        """Train all batches on both models, and read.

        Args:
            start: attaches a tracker to one of the models.

        Returns:
            Seconds per step: ``seconds`` with the tracker, ``without`` it, and their parts ``record`` and ``read``;
            and ``ratio``.
        """
        self._models.reverse()
        tracked, other = self._models
        after_step, read, stop = start(tracked.model)

        def train(which: _Trained, batch: KeyedJaggedTensor) -> None:
            which.step(self._dense, batch, self._labels)
            if which is tracked:
                after_step()

        before = recorded_seconds()
        seconds: dict[_Trained, list[float]] = {tracked: [], other: []}
        for number, batch in enumerate(self._sparse):
            for which in self._models if number % 2 else reversed(self._models):
                seconds[which].append(timed(partial(train, which, batch))["seconds"])
        record = (recorded_seconds() - before) / len(self._sparse)
        found: dict[str, Tensor] = {}
        share = timed(lambda: found.update(read()))["seconds"] / len(self._sparse)
        stop()
        for fqn, ids in found.items():
            assert torch.equal(ids.sort()[0], self._expected[fqn]), f"{fqn}: not the rows that were looked up"
        without = median(seconds[other])
        ratio = median(map(truediv, seconds[tracked], seconds[other])) + share / without
        return {
            "seconds": median(seconds[tracked]) + share,
            "without": without,
            "ratio": ratio,
            "record": record,
            "read": share,
        }

    def off(self) -> Figures:
        """Train without a tracker on either model, to measure the noise."""
        return self.turn(lambda _: (_nothing, dict, _nothing))

    def ours(self, mode: TrackingMode, top_k: TopK | None) -> Figures:
        """Train with this library's tracker."""

        def start(model: DistributedModelParallel) -> Any:  # noqa: ANN401
            tracker = ModelDeltaTracker(model, mode=mode)

            def read() -> dict[str, Tensor]:
                delta = tracker.get_delta(top_k=top_k)
                left = delta.left_out
                return {
                    fqn: torch.cat([rows.ids, left[fqn].ids]) if fqn in left else rows.ids
                    for fqn, rows in delta.items()
                }

            return tracker.step, read, tracker.detach

        return self.turn(start)

    def theirs(self) -> Figures:
        """Train with TorchRec's tracker."""

        def start(model: DistributedModelParallel) -> Any:  # noqa: ANN401
            tracker = ModelDeltaTrackerTrec(model._dmp_wrapped_module)  # noqa: SLF001  as DMP itself does
            tracker.step()

            def stop() -> None:
                for module in tracker.tracked_modules.values():
                    module.post_lookup_tracker_fn = None

            return tracker.step, tracker.get_unique_ids, stop

        return self.turn(start)


def _nothing() -> None:
    pass


def recorded_seconds() -> float:
    """Return the total recording time of this library's trackers in seconds."""
    return sum(cell.collect_total() for cell in metrics.record_seconds.cells)


def _num_syncs(store_of: Callable[[], Store]) -> int:
    """Return how often recording a batch of two tables would wait for the device."""
    with find_syncs() as found:
        store = store_of()
        lengths = [6, 6]
        features = KeyedJaggedTensor(
            keys=["a", "b"],
            values=on_device(torch.tensor([3, 1, 3, 0, 2, 2, 5, 1, 1, 4, 0, 5])),
            lengths=on_device(torch.tensor(lengths)),
            length_per_key=lengths,
            offset_per_key=[0, 6, 12],
        )
        store.record(features)
        before = len(found)
        store.record(features)
    return len(found) - before


def _syncs() -> dict[str, int]:
    """Return the number of syncs for each row of the results."""
    num_rows = {"a": 6, "b": 6}
    weights = {name: on_device(torch.rand(count, 2)) for name, count in num_rows.items()}
    ids_only = _num_syncs(lambda: Ours(num_rows, device=SIMULATED))
    embedding = _num_syncs(lambda: Ours(num_rows, weights=weights, device=SIMULATED))
    assert ids_only == embedding == 0, (ids_only, embedding)
    by_mode = {name: embedding if mode is _EMBEDDING else ids_only for name, (mode, _) in _OURS.items()}
    return {_OFF: 0, **by_mode, _THEIRS: _num_syncs(lambda: Theirs(num_rows))}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, check every read, and write the results."""
    settings = parser("bench_step", __doc__ or "").parse_args(argv)
    num_rows, batch_size, num_steps = (1000, 32, 2) if settings.tiny else (1_000_000, 4096, 20)
    repeats = settings.repeats or (1 if settings.tiny else 3)
    report = Report(
        name="bench_step",
        settings={
            "tables": f"8 of {num_rows} x 64",
            "batch": batch_size,
            "a read every": f"{num_steps} steps",
            "repeats": repeats,
        },
        columns=("tracker", "step, ms", "against no tracker", "in the tracker, ms", "of a step", "syncs"),
        notes=[*_NOTES],
    )
    syncs = _syncs()
    with one_rank():
        turns = _Turns(tables(8, num_rows), batch_size, num_steps)
        cases: dict[str, Callable[[], Figures]] = {_OFF: turns.off}
        for name, (mode, top_k) in _OURS.items():
            cases[name] = lambda mode=mode, top_k=top_k: turns.ours(mode, top_k)  # type: ignore[misc]
        cases[_THEIRS] = turns.theirs
        turns.off()  # warm-up
        found = interleaved(cases, repeats=repeats, warmups=0)
    for name, samples in found.items():
        report.add(name, samples)
        report.figures[f"{name}: syncs"] = {"count": (syncs[name],)}
        inside = Sample(tuple(map(add, samples["record"].values, samples["read"].values)))
        is_ours = name in _OURS
        report.lines.append(
            (
                name,
                samples["seconds"].text(1e3),
                samples["ratio"].text(digits=3),
                inside.text(1e3, 2) if is_ours else "",
                f"{inside.median / samples['without'].median:.2%}" if is_ours else "",
                str(syncs[name]),
            )
        )
    report.finish(settings.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
