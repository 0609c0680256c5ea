"""Cost of tracking in a training step: ``python -m benchmarks.bench_step``.

The model is a DLRM with eight tables under DistributedModelParallel on one rank, with layers as wide as those of
MLPerf's DLRM. Two equal models, one of them with a tracker, train alternately step by step, so that other load on the
machine affects both. A turn is a number of steps of the model with the tracker and a read, which are not timed and
after which the tracker has its memory; then as many steps of each model and a read. Then the models swap roles. Each
read must return exactly the rows that were looked up. The batch sizes are those with which a step took about 330,
80 and 20 ms on two cores.

On the CPU nothing waits for a device. Device syncs of recording are counted separately, on a simulated device
(:mod:`tests.syncs`).
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
from benchmarks.ids import zipf_ids
from benchmarks.stores import Ours, Store, Theirs, lookups
from benchmarks.workloads import Table, bags, one_rank, shard, tables
from delta_tracker import ModelDeltaTracker, TopK, TrackingMode
from delta_tracker.monitor import metrics
from tests.syncs import SIMULATED, find_syncs, on_device

_NUM_DENSE = 13
_OFF, _THEIRS = "no tracker", "TorchRec, ID_ONLY"
_EMBEDDING = TrackingMode.EMBEDDING
_OURS: dict[str, tuple[TrackingMode, TopK | None]] = {
    "ID_ONLY": (TrackingMode.ID_ONLY, None),
    "EMBEDDING": (_EMBEDDING, None),
    "EMBEDDING, top 10 %": (_EMBEDDING, TopK(fraction=0.1)),
}
_BATCHES = {4096: 4, 1024: 8, 256: 20}  # size to number of turns of each case
_NOTES = (
    (
        "Step: the median of the steps with the tracker, plus a share of the read at the end of each turn. Medians"
        " (smallest-largest) of the turns."
    ),
    (
        "Against no tracker: the median of the ratios of a step to the other model's step on the same batch, directly"
        " before or after it, plus the read's share; in parentheses the bounds of the median with a confidence of 95 %."
    ),
    (
        "Per looked-up row, in the tracker: the mean of the metric record_seconds per step plus the read's share,"
        " divided by the ids of a batch. Finding the ids of a lookup, calling the hooks, and effects on caches are not"
        " included."
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

    Attributes:
        ratios: ratio of each step of the last turn to the other model's step, plus the read's share.
    """

    def __init__(self, table_set: Sequence[Table], batch_size: int, num_steps: int) -> None:
        self._models = [_Trained(table_set), _Trained(table_set)]
        self.ratios: list[float] = []
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
        """Train all batches on both models, and read. Before, do the same with the tracker alone, without timing.

        Args:
            start: attaches a tracker to one of the models.

        Returns:
            Seconds per step: ``seconds`` with the tracker, ``without`` it, and their parts ``record`` and ``read``.
        """
        self._models.reverse()
        tracked, other = self._models
        after_step, read, stop = start(tracked.model)

        def train(which: _Trained, batch: KeyedJaggedTensor) -> None:
            which.step(self._dense, batch, self._labels)
            if which is tracked:
                after_step()

        def check(found: Mapping[str, Tensor]) -> None:
            for fqn, ids in found.items():
                assert torch.equal(ids.sort()[0], self._expected[fqn]), f"{fqn}: not the rows that were looked up"

        for batch in self._sparse:
            train(tracked, batch)
        check(read())
        before = recorded_seconds()
        seconds: dict[_Trained, list[float]] = {tracked: [], other: []}
        for number, batch in enumerate(self._sparse):
            for which in self._models if number % 2 else reversed(self._models):
                seconds[which].append(timed(partial(train, which, batch))["seconds"])
        record = (recorded_seconds() - before) / len(self._sparse)
        found: dict[str, Tensor] = {}
        share = timed(lambda: found.update(read()))["seconds"] / len(self._sparse)
        stop()
        check(found)
        without = median(seconds[other])
        self.ratios = [ratio + share / without for ratio in map(truediv, seconds[tracked], seconds[other])]
        return {
            "seconds": median(seconds[tracked]) + share,
            "without": without,
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

            def read() -> dict[str, Tensor]:
                found: dict[str, Tensor] = tracker.get_unique_ids()
                tracker.step()  # the next read would omit rows that are looked up in the step of this read
                return found

            def stop() -> None:
                for module in tracker.tracked_modules.values():
                    module.post_lookup_tracker_fn = None

            return tracker.step, read, stop

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
    num_rows, num_steps = (1000, 2) if settings.tiny else (1_000_000, 20)
    batches = {32: 1} if settings.tiny else _BATCHES
    report = Report(
        name="bench_step",
        settings={
            "tables": f"8 of {num_rows} x 64",
            "a read every": f"{num_steps} steps",
            "turns": settings.repeats or "/".join(map(str, batches.values())),
        },
        columns=("batch, tracker", "step, ms", "against no tracker", "per looked-up row, ns", "read, ms", "syncs"),
        notes=[*_NOTES],
    )
    syncs = _syncs()
    for name, count in syncs.items():
        report.figures[f"{name}: syncs"] = {"count": (count,)}
    with one_rank():
        for batch_size, num_turns in batches.items():
            _measure(report, tables(8, num_rows), batch_size, num_steps, settings.repeats or num_turns, syncs)
    report.finish(settings.out)
    return 0


def _measure(
    report: Report,
    table_set: Sequence[Table],
    batch_size: int,
    num_steps: int,
    num_turns: int,
    syncs: Mapping[str, int],
) -> None:
    """Measure all trackers with one size of batches, and add their lines."""
    turns = _Turns(table_set, batch_size, num_steps)
    cases: dict[str, Callable[[], Figures]] = {_OFF: turns.off}
    for name, (mode, top_k) in _OURS.items():
        cases[name] = partial(turns.ours, mode, top_k)
    cases[_THEIRS] = turns.theirs
    turns.off()  # warm-up
    ratios: dict[str, list[float]] = {name: [] for name in cases}

    def run(name: str) -> Figures:
        figures = cases[name]()
        ratios[name] += turns.ratios
        return figures

    found = interleaved({name: partial(run, name) for name in cases}, repeats=num_turns, warmups=0)
    num_ids = batch_size * len(table_set)
    for name, samples in found.items():
        ratio = Sample(tuple(ratios[name]))
        report.add(f"{name}, batch {batch_size}", {**samples, "ratio": ratio})
        inside = Sample(tuple(map(add, samples["record"].values, samples["read"].values)))
        low, high = ratio.interval
        report.lines.append(
            (
                f"{batch_size}, {name}",
                samples["seconds"].text(1e3),
                f"{ratio.median:.3f} ({low:.3f}-{high:.3f})",
                inside.text(1e9 / num_ids) if name in _OURS else "",
                "" if name == _OFF else samples["read"].text(1e3 * num_steps),
                str(syncs[name]),
            )
        )


if __name__ == "__main__":
    raise SystemExit(main())
