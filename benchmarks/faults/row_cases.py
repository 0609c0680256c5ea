"""Cases about the reported rows: faults 2 to 5, 7, 8 and 14 to 18."""

from __future__ import annotations

import torch
from torch import distributed as dist

from benchmarks.faults.models import DIM, Table, Training, build, build_managed, build_several
from benchmarks.faults.registry import case, expect
from benchmarks.faults.trackers import Copy, Make, differing, expect_changes


@case(2)
def read_before_backward(make: Make) -> None:
    """A read between forward and backward does not lose the batch's rows."""
    training = build(Table("t"))
    copy = Copy(training, make(training))
    loss = training.forward(t=[1, 2, 3])
    copy.read()
    loss.backward()
    training.train(t=[9])
    copy.read()
    copy.expect_equal()


@case(2)
def forgotten_step(make: Make) -> None:
    """No row is lost without calls of ``step()``."""
    training = build(Table("t"))
    copy = Copy(training, make(training, steps=False))
    for row in (1, 2):
        training.train(t=[row])
        copy.read()
    copy.expect_equal()


@case(3)
def read_nothing(make: Make) -> None:
    """A second read without training in between is empty."""
    training = build(Table("t"))
    tracker = make(training)
    training.train(t=[1])
    tracker.read()
    expect(not any(rows.ids for rows in tracker.read().values()), "reports the rows again")


@case(4)
def shared_feature(make: Make) -> None:
    """One feature is looked up in two tables."""
    training = build(Table("a", feature="f"), Table("b", feature="f"))
    tracker = make(training)
    before = rows_of(training)
    training.train(f=[1, 2])
    expect_changes(training, before, tracker.read())


@case(4)
def shared_name(make: Make) -> None:
    """Two modules have a table of the same name, for a feature each."""
    tables = {side: [Table("t", feature=side)] for side in ("left", "right")}
    training = build_several(tables, has_dense=True)
    tracker = make(training)
    before = rows_of(training)
    training.train(left=[1, 2], right=[3])
    expect_changes(training, before, tracker.read())


@case(5, num_ranks=2)
def row_offset(make: Make) -> None:
    """A rank reports ids of the whole table."""
    training = build(Table("t", rows=12, sharding="rows"))
    tracker = make(training)
    training.train(t=[0] if dist.get_rank() == 0 else [11])
    (rows,) = tracker.read().values()
    expected = [0] if dist.get_rank() == 0 else [11]
    expect(rows.table_ids == expected, f"table row {expected[0]} is reported as {rows.table_ids[0]}")


@case(5)
def column_shards(make: Make) -> None:
    """If one rank has both column shards of a table, old rows have all columns."""
    training = build(Table("t", sharding="columns"))
    tracker = make(training, "embedding")
    before = training.rows("ec.embeddings.t")
    training.train(t=[1, 2])
    (rows,) = tracker.read().values()
    expect(rows.states is not None, "no old rows")
    assert rows.states is not None
    expect(rows.states.shape[1] == DIM, f"old rows have {rows.states.shape[1]} of {DIM} columns")
    expect(torch.equal(rows.states, before[rows.ids]), "old rows are wrong")


@case(7)
def evaluation(make: Make) -> None:
    """Lookups of an evaluation are not reported."""
    training = build(Table("t"))
    tracker = make(training)
    before = rows_of(training)
    training.train(t=[1])
    training.model.eval()
    with torch.no_grad():
        training.forward(t=[7, 8])
    expect_changes(training, before, tracker.read())


@case(8, num_ranks=2)
def replicas(make: Make) -> None:
    """A replica reports the rows that other ranks looked up."""
    training = build(Table("t", sharding="replicated"), bag=True, dense=torch.optim.SGD)
    tracker = make(training)
    before = rows_of(training)
    training.train(t=[2] if dist.get_rank() == 0 else [5])
    expect_changes(training, before, tracker.read())


@case(14)
def skipped_table(make: Make) -> None:
    """One of a module's tables is skipped."""
    training = build(Table("a"), Table("b"))
    tracker = make(training, skip=["b"])
    before = rows_of(training)
    training.train(a=[1, 2], b=[3])
    delta = tracker.read()
    expect("ec.embeddings.b" not in delta, "reports the skipped table")
    del before["ec.embeddings.b"]
    expect_changes(training, before, delta)


@case(15)
def managed_collisions(make: Make) -> None:
    """Ids are remapped to rows before the lookup."""
    training = build_managed(slots=[100, 200, 300, 400])
    tracker = make(training)
    before = rows_of(training)
    training.train(t=[100, 300])
    expect_changes(training, before, tracker.read())


def _adam(make: Make, sharding: str) -> None:
    training = build(Table("t", sharding=sharding), bag=True, dense=torch.optim.Adam)
    tracker = make(training)
    training.train(t=[1])
    tracker.read()
    before = rows_of(training)
    training.train(t=[2])
    moved = differing(before["ec.embedding_bags.t"], training.rows("ec.embedding_bags.t"))
    expect(1 in moved, "the case moves no row without a lookup")
    expect_changes(training, before, tracker.read())


@case(16)
def adam_on_dense(make: Make) -> None:
    """Adam changes a row in a batch that does not look it up."""
    _adam(make, "rank 0")


@case(16)
def adam_on_replicated(make: Make) -> None:
    """Adam changes a row of a replica in a batch that does not look it up."""
    _adam(make, "replicated")


@case(17)
def read_before_step(make: Make) -> None:
    """A read between backward and the optimizer's step does not lose rows."""
    training = build(Table("t"), bag=True, dense=torch.optim.SGD)
    copy = Copy(training, make(training))
    training.forward(t=[1, 2]).backward()
    copy.read()
    training.step()
    training.train(t=[9])
    copy.read()
    copy.expect_equal()


def _load_state(make: Make, training: Training, other: Training) -> None:
    copy = Copy(training, make(training))
    other.train(t=[3, 4])
    training.model.load_state_dict(other.model.state_dict())
    training.train(t=[9])
    copy.read()
    copy.expect_equal()


@case(17)
def load_dense_state(make: Make) -> None:
    """Rows of a checkpoint loaded into a DENSE table are reported."""
    _load_state(make, *(build(Table("t"), bag=True, dense=torch.optim.SGD) for _ in range(2)))


@case(17)
def load_fused_state(make: Make) -> None:
    """Rows of a checkpoint loaded into a FUSED table are reported."""
    _load_state(make, *(build(Table("t")) for _ in range(2)))


@case(18)
def no_dense_parameters(make: Make) -> None:
    """A model without dense parameters is tracked."""
    training = build_several({"ec": [Table("t")]}, has_dense=False)
    tracker = make(training)
    before = rows_of(training)
    training.train(t=[1, 2])
    expect_changes(training, before, tracker.read())


def rows_of(training: Training) -> dict[str, torch.Tensor]:
    """Return table FQN to a copy of its rows on this rank."""
    return {fqn: training.rows(fqn) for fqn in training.shards}
