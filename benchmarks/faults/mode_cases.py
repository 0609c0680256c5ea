"""Cases about old states: faults 1, 6, 9, 10 and 13."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import SGD

from benchmarks.faults.models import Table, Training, build, kernels
from benchmarks.faults.registry import case, expect
from benchmarks.faults.trackers import Make, Rows

_NUM_BATCHES = 20


class _Probe:
    """A hook of an autograd node, with the same lifetime as the node."""

    def __call__(self, *gradients: object) -> None:
        """Return None, which keeps the gradients."""


@case(1)
def live_graphs(make: Make) -> None:
    """The autograd graph of a batch is freed after the batch."""
    training = build(Table("t"))
    tracker = make(training, "embedding")
    probes: list[weakref.ref[_Probe]] = []

    def attach(module: object, arguments: object, output: Tensor) -> None:
        del module, arguments
        probe = _Probe()
        probes.append(weakref.ref(probe))
        assert output.grad_fn is not None
        output.grad_fn.register_hook(probe)

    for _, kernel in kernels(training.model):
        kernel.register_forward_hook(attach)
    for number in range(_NUM_BATCHES):
        training.train(t=[number % 12])
    gc.collect()
    num_alive = sum(probe() is not None for probe in probes)
    expect(len(probes) == _NUM_BATCHES, "the case counts no graphs")
    expect(not num_alive, f"{num_alive} of {_NUM_BATCHES} graphs stay alive")
    expect(any(rows.ids for rows in tracker.read().values()), "reports nothing")


def _expect_old_rows(training: Training, before: dict[str, Tensor], delta: dict[str, Rows]) -> None:
    for fqn, rows in before.items():
        found = delta[fqn]
        assert found.states is not None
        expect(found.ids, f"nothing is reported of {fqn}")
        expect(torch.equal(found.states, rows[found.ids]), "old rows are wrong")
        expect(not torch.equal(found.states, training.rows(fqn)[found.ids]), "the case changes nothing")


@case(6, num_ranks=2)
def rank_without_ids(make: Make) -> None:
    """A table is on rank 0 only, so rank 1 has no ids of it."""
    training = build(Table("t", sharding="rank 0"))
    tracker = make(training, "embedding")
    before = {fqn: training.rows(fqn) for fqn in training.shards}
    training.train(t=[1 + dist.get_rank()])
    _expect_old_rows(training, before, tracker.read())


@case(9)
def pooled_rows(make: Make) -> None:
    """Old rows of a table with pooled lookups are right."""
    training = build(Table("t"), bag=True)
    tracker = make(training, "embedding")
    before = {fqn: training.rows(fqn) for fqn in training.shards}
    training.train(t=[1, 2])
    _expect_old_rows(training, before, tracker.read())


@case(10)
def momentum_of_second_table(make: Make) -> None:
    """The growth of the optimizer's sums is right for both tables of a fused group."""
    training = build(Table("a"), Table("b"))
    training.train(a=[1, 1, 2], b=[5])
    tracker = make(training, "momentum_diff")
    before = _sums(training)
    training.train(a=[1], b=[1, 2, 2])
    delta = tracker.read()
    for fqn, now in _sums(training).items():
        rows = delta[fqn]
        assert rows.states is not None
        is_right = torch.allclose(rows.states.flatten(), (now - before[fqn])[rows.ids])
        expect(is_right, f"the growth of table {fqn.rpartition('.')[2]!r} is wrong")


def _sums(training: Training) -> dict[str, Tensor]:
    sums = {}
    for fqn, shards in training.shards.items():
        (shard,) = shards
        assert shard.sums is not None
        sums[fqn] = shard.sums.clone()
    return sums


@case(10)
def momentum_of_sgd(make: Make) -> None:
    """An optimizer without momentum is rejected when the tracker is built, and the error names the table."""
    training = build(Table("t"), fused=SGD)
    try:
        tracker = make(training, "momentum_diff")
    except Exception as refusal:  # noqa: BLE001  any type is accepted, if the message names the table
        expect("'ec.embeddings.t'" in str(refusal), f"{type(refusal).__name__} does not name the table")
        return
    try:
        training.train(t=[1])
        tracker.read()
    except Exception as late:  # noqa: BLE001
        expect(None, f"accepts SGD, then {type(late).__name__}")
    expect(None, "accepts SGD")


@case(13)
def top_half(make: Make) -> None:
    """Top-k returns the two of four rows that changed most."""
    training = build(Table("t"), fused=SGD)
    tracker = make(training, "embedding")
    training.train(t=[0, 1, 1, 2, 2, 2, 3, 3, 3, 3])
    (rows,) = tracker.read_top(0.5).values()
    asked = [2, 3]
    expect(len(rows.ids) == len(asked), f"{len(rows.ids)} of 4 rows when asked for half")
    expect(sorted(rows.ids) == asked, "not the rows that moved most")
