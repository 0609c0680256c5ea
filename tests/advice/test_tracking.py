"""Advice to those who track a model, and save or load the state of its tracker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from delta_tracker import ModelDeltaTracker, Publisher, RankCounters, TopK, TrackingMode
from delta_tracker.errors import (
    CheckpointError,
    DetachedError,
    InvalidArgumentError,
    NeedsSnapshotError,
    ReservedConsumerError,
    StaleDeltaError,
    StateMismatchError,
    UnsupportedModelError,
    UntrackedTrainingWarning,
)
from tests.advice.jobs import Job, refused, small_model
from tests.ranks import RankPool

_CASES = "tests.advice.tracking_cases"


class _Trained:
    """A model with a tracker, without a publisher."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.model = small_model() if model is None else model
        self.tracker = ModelDeltaTracker(self.model, **options)

    def train(self, *rows: int) -> None:
        self.model(torch.tensor([list(rows) or [1, 2, 3]])).sum().backward()
        torch.optim.SGD(self.model.parameters(), lr=0.1).step()
        self.model.zero_grad()
        self.tracker.step()


@pytest.mark.advice("NeedsSnapshotError: LogConsumers.read")
@pytest.mark.parametrize("way", ["clear", "max_bytes"])
def test_a_dropped_consumer_gets_all_rows_and_then_deltas(way: str) -> None:
    trained = _Trained(mode=TrackingMode.EMBEDDING, max_bytes=200, engine="torch")
    for row in range(20):
        trained.train(row)
    refused(
        NeedsSnapshotError, trained.tracker.get_delta, "Call clear(consumer), copy every row (read_rows)", "max_bytes"
    )
    if way == "clear":
        trained.tracker.clear("default")
        copied = trained.tracker.read_rows("0")
        trained.train(3)
        delta = trained.tracker.get_delta(with_values=True)
        copied[delta["0"].ids] = delta["0"].values
        assert torch.equal(copied, trained.model[0].weight)
    else:
        larger = _Trained(mode=TrackingMode.EMBEDDING, max_bytes=1 << 20, engine="torch")
        for row in range(20):
            larger.train(row)
        assert larger.tracker.get_delta_ids()["0"].tolist() == list(range(20))


@pytest.mark.advice("StaleDeltaError: LogConsumers.uncommitted")
def test_a_stale_delta_is_read_again() -> None:
    trained = _Trained()
    trained.train(1, 2)
    first = trained.tracker.get_delta(commit=False)
    trained.tracker.get_delta(commit=False)
    refused(StaleDeltaError, lambda: trained.tracker.commit(first), "Call get_delta(commit=False) again and commit")
    delta = trained.tracker.get_delta(commit=False)
    trained.tracker.commit(delta)
    assert delta["0"].ids.tolist() == [1, 2]
    assert trained.tracker.get_delta().num_rows == 0


@pytest.mark.advice("DetachedError: TrackedModel.check_attached")
def test_a_detached_tracker_is_attached_again() -> None:
    trained = _Trained()
    trained.tracker.detach()
    refused(DetachedError, trained.tracker.get_delta, "Call reattach()")
    refused(DetachedError, trained.tracker.state_dict, "Call reattach()")
    trained.tracker.reattach()
    assert len(trained.tracker.get_delta_ids()["0"]) in (0, 20)  # a table that is compared keeps what is known of it
    trained.train(4)
    assert trained.tracker.get_delta_ids()["0"].tolist() == [4]


@pytest.mark.advice("InvalidArgumentError: LogConsumers.find")
def test_a_known_consumer_is_named() -> None:
    trained = _Trained(consumers=["a", "b"])
    trained.train(5)
    for name in (None, "c"):
        refused(InvalidArgumentError, lambda name=name: trained.tracker.get_delta(name), "known consumers: 'a', 'b'")
        for known in ("a", "b"):
            assert trained.tracker.get_delta(known, commit=False)["0"].ids.tolist() == [5]


@pytest.mark.parametrize("way", ["tracker", "optimizer"])
def test_the_model_that_is_trained_is_tracked(way: str) -> None:
    trained, copied = _Trained(), small_model()
    copied.load_state_dict(trained.model.state_dict())
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    copied(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    with pytest.warns(UntrackedTrainingWarning, match="Build the tracker with the model that is trained"):
        assert trained.tracker.get_delta().num_rows == 0
    if way == "tracker":
        optimizer.zero_grad()
        trained = _Trained(copied)
    trained.train(4, 5)
    assert trained.tracker.get_delta_ids()["0"].tolist() == [4, 5]


@pytest.mark.advice("UnsupportedModelError: discover")
def test_a_model_with_a_table_is_passed() -> None:
    refused(UnsupportedModelError, lambda: ModelDeltaTracker(nn.Linear(2, 2)), "nn.Embedding, nn.EmbeddingBag")
    assert list(ModelDeltaTracker(nn.Sequential(nn.Embedding(3, 2))).tables) == ["0"]


@pytest.mark.advice("ReservedConsumerError: LogConsumers.resolve")
def test_each_reader_has_a_consumer_of_its_own(tmp_path: Path) -> None:
    job = Job(tmp_path)
    refused(ReservedConsumerError, job.tracker.get_delta, "tracker.add_consumer(name)")
    refused(ReservedConsumerError, lambda: Publisher(job.tracker, f"{job.url}2"), "needs its own")
    job.tracker.add_consumer("mine")
    with Publisher(job.tracker, f"{job.url}2", "mine") as other:
        job.train(6)
        assert other.publish().kind == "snapshot"
    assert job.tracker.get_delta_ids("mine")["0"].tolist() == []


@pytest.mark.advice("ReservedConsumerError: TrackerCheckpoint._check_free")
@pytest.mark.parametrize("is_empty", [False, True], ids=["a state", "nothing"])
def test_a_state_is_loaded_between_two_publishers(tmp_path: Path, is_empty: bool) -> None:
    job = Job(tmp_path)
    job.train(7)
    saved, weights = job.tracker.state_dict(), {name: each.clone() for name, each in job.model.state_dict().items()}
    job.train(8)
    state = {} if is_empty else saved
    refused(ReservedConsumerError, lambda: job.tracker.load_state_dict(state), "Close the publisher, load")
    job.publisher.close()
    job.model.load_state_dict(weights)
    job.tracker.load_state_dict(state)
    job.publisher = Publisher(job.tracker, job.url)
    job.publish(9)
    model = small_model()
    with job.serve(model) as predictor:
        predictor.sync()
        assert job.is_served_by(model, predictor.version)


@pytest.mark.advice("UnsupportedModelError: plain_shards")
@pytest.mark.parametrize(
    ("build", "words", "repair"),
    [
        (lambda: nn.Embedding(5, 2), "a model that contains it", nn.Sequential),
        (lambda: small_model(device="meta"), "to_empty(device=...)", lambda model: model.to_empty(device="cpu")),
        (lambda: nn.Sequential(nn.Embedding(5, 2, dtype=torch.float64), nn.Embedding(5, 2)), "fqns_to_skip", None),
        (lambda: nn.Sequential(nn.Embedding(5, 2, device="meta"), nn.Embedding(5, 2)), "name it in fqns_to_skip", None),
    ],
    ids=["root", "meta", "float64", "meta skipped"],
)
def test_a_plain_table_that_cannot_be_tracked_is_repaired_or_skipped(
    build: Callable[[], nn.Module], words: str, repair: Callable[[nn.Module], nn.Module] | None
) -> None:
    model = build()
    error = refused(UnsupportedModelError, lambda: ModelDeltaTracker(model), words)
    options = {"fqns_to_skip": list(error.parts)} if repair is None else {}
    tracker = ModelDeltaTracker(model if repair is None else repair(model), **options)
    assert len(tracker.tables) == 1


@pytest.mark.advice("UnsupportedModelError: PlainTable.check", "InvalidArgumentError: TrackerReader.cut")
@pytest.mark.parametrize("change", ["replaced", "half", "other rows"])
@pytest.mark.parametrize("way", ["reattach", "later"])
def test_a_tracker_attaches_to_a_converted_model(tmp_path: Path, change: str, way: str) -> None:
    job = Job(tmp_path)
    if change == "half":
        job.model.half()
    else:
        job.model[0] = nn.EmbeddingBag(20 if change == "replaced" else 30, 4, sparse=True)
    for call in (job.publisher.publish, job.publisher.snapshot, job.tracker.state_dict):
        refused(UnsupportedModelError, call, "Call tracker.reattach(), or build the tracker after")
    if way == "reattach":
        job.tracker.reattach()
        if change == "other rows":
            assert job.publisher.publish().kind == "snapshot"  # no delta of the former table's versions
    else:
        job.publisher.close()
        job.tracker.detach()
        job.tracker = ModelDeltaTracker(job.model)
        job.publisher = Publisher(job.tracker, job.url)
    job.train(3)
    job.publisher.snapshot()
    served = nn.Sequential(nn.EmbeddingBag(30 if change == "other rows" else 20, 4, dtype=job.model[0].weight.dtype))
    assert job.is_served_by(served, job.serve(served).sync())


@pytest.mark.advice(
    "CheckpointError: parse parse_all take RankHeader.rows _checked_states "
    "_SavedParts._read_headers _SavedParts.wanted "
    "MetricCounter.check_fields MetricCounter.merge",
    "StateMismatchError: TrackerCheckpoint.plan_load check_tables check_parts_alike CounterSet.check _check_saved "
    "Resharding._indices _checked_states",
)
@pytest.mark.parametrize("kind", ["foreign", "garbled header", "missing tensor", "mode", "consumers", "tables"])
def test_an_older_state_or_none_is_loaded(kind: str) -> None:
    trained = _Trained()
    older = trained.tracker.state_dict()
    trained.train(1, 2)
    state = trained.tracker.state_dict()
    (header,) = [key for key in state if key.endswith("header")]
    bad: dict[str, torch.Tensor] = {
        "foreign": lambda: {"a": torch.zeros(3)},
        "garbled header": lambda: state | {header: state[header][:-1]},
        "missing tensor": lambda: {header: state[header]},
        "mode": _Trained(mode=TrackingMode.EMBEDDING).tracker.state_dict,
        "consumers": _Trained(consumers=["other"]).tracker.state_dict,
        "tables": _Trained(small_model(2)).tracker.state_dict,
    }[kind]()
    error = StateMismatchError if kind in ("mode", "consumers", "tables") else CheckpointError
    refused(error, lambda: trained.tracker.load_state_dict(bad), "A tracker can also load {}")
    assert trained.tracker.num_pending()["0"] == 2
    trained.tracker.load_state_dict(older)
    assert trained.tracker.num_pending()["0"] == 0
    trained.tracker.load_state_dict({})
    assert trained.tracker.num_pending()["0"] == 20
    if error is StateMismatchError:
        fitting = {
            "mode": lambda: _Trained(mode=TrackingMode.EMBEDDING),
            "consumers": lambda: _Trained(consumers=["other"]),
            "tables": lambda: _Trained(small_model(2)),
        }[kind]()
        fitting.tracker.load_state_dict(bad)


@pytest.mark.advice(
    "CheckpointError: RankCounters.plan_load SavedCounters.state_dict", "StateMismatchError: RankCounters.plan_load"
)
def test_counters_load_a_checkpoint_that_has_them_or_none() -> None:
    counter = torchmetrics.SumMetric()
    counters = RankCounters({"seen": counter})
    counter.update(3)
    saved = counters.state_dict()
    counter.update(4)
    refused(CheckpointError, lambda: counters.load_state_dict({}), "Load a checkpoint that has them, or load none")
    tracker = ModelDeltaTracker(small_model())
    refused(
        StateMismatchError, lambda: counters.load_state_dict(tracker.state_dict()), "an object with the same arguments"
    )
    assert counter.compute() == 7
    counters.load_state_dict(saved)
    assert counter.compute() == 3


@pytest.mark.advice("CheckpointError: Resharding._find counted_by")
def test_the_parts_of_all_ranks_are_loaded(two_ranks: RankPool) -> None:
    two_ranks.run(f"{_CASES}:incomplete")


@pytest.mark.advice("InvalidArgumentError: DeltaReader.check")
@pytest.mark.parametrize("way", ["mode", "score"])
def test_top_rows_need_scores(way: str) -> None:
    refused(
        InvalidArgumentError, lambda: _Trained().tracker.get_delta(top_k=TopK(rows=1)), "Track in EMBEDDING", "a score"
    )
    trained = _Trained(mode="EMBEDDING") if way == "mode" else _Trained()
    trained.train(1, 2)
    top_k = TopK(rows=1) if way == "mode" else TopK(rows=1, score=lambda _, rows: rows.ids.float())
    assert trained.tracker.get_delta(top_k=top_k).num_rows == 1


@pytest.mark.advice("InvalidArgumentError: LogConsumers.rewind")
def test_a_tracker_that_keeps_its_history_can_rewind() -> None:
    refused(InvalidArgumentError, _Trained().tracker.rewind, "Build the tracker with delete_on_read=False")
    trained = _Trained(delete_on_read=False)
    trained.train(3)
    trained.tracker.get_delta()
    trained.tracker.rewind()
    assert trained.tracker.get_delta_ids()["0"].tolist() == [3]


@pytest.mark.advice("InvalidArgumentError: ConsumerHandle._held")
def test_a_released_consumer_is_reserved_again() -> None:
    trained = _Trained()
    handle = trained.tracker.reserve()
    handle.release()
    refused(InvalidArgumentError, handle.read, "Call reserve() of the tracker again")
    trained.train(3)
    with trained.tracker.reserve() as again:
        assert again.read()["0"].ids.tolist() == [3]


@pytest.mark.advice("InvalidArgumentError: _as_mergeable")
def test_a_counter_is_registered_with_what_it_needs() -> None:
    trained = _Trained()
    refused(
        InvalidArgumentError, lambda: trained.tracker.register_counter("seen", 3), "torchmetrics.Metric, or an object"
    )
    both = torchmetrics.MetricCollection([torchmetrics.SumMetric(), torchmetrics.MaxMetric()], compute_groups=False)
    refused(InvalidArgumentError, lambda: trained.tracker.register_counter("both", both), "under a name of its own")
    for name, metric in both.items():
        trained.tracker.register_counter(name, metric)
    both.update(2.0)
    saved = trained.tracker.state_dict()
    both.update(3.0)
    trained.tracker.load_state_dict(saved)
    assert both.compute() == {"SumMetric": 2, "MaxMetric": 2}


@pytest.mark.advice("UnsupportedModelError: MomentumLastCapture.check MomentumDiffCapture.check DeltaReader.check")
def test_a_mode_that_suits_the_optimizer_is_chosen(one_rank: RankPool) -> None:
    one_rank.run(f"{_CASES}:modes")


@pytest.mark.advice("UnsupportedModelError: plain_shards PlainTable.check")
def test_a_tracker_built_before_the_model_is_sharded(one_rank: RankPool) -> None:
    one_rank.run(f"{_CASES}:before_sharding")


@pytest.mark.parametrize("form", ["tracker", "counters", "inside another object"])
def test_dcp_loads_into_the_object_that_the_error_names(two_ranks: RankPool, tmp_path: Path, form: str) -> None:
    two_ranks.run(f"{_CASES}:loads_with_dcp", path=str(tmp_path), form=form)


@pytest.mark.advice("DetachedError: TrackedModel.check_attached")
def test_all_ranks_attach_again(two_ranks: RankPool) -> None:
    two_ranks.run(f"{_CASES}:one_detached")


@pytest.mark.advice("RankFailedError: run_on_all_ranks")
def test_all_ranks_build_the_same(two_ranks: RankPool) -> None:
    two_ranks.run(f"{_CASES}:disagreeing")


@pytest.mark.advice("InvalidArgumentError: ModelDeltaTracker.record_embeddings dense_tensors _named _parts")
def test_lookups_are_recorded_in_their_mode_and_whole_tensors_published(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(f"{_CASES}:recorded", url=f"file://{tmp_path}")


@pytest.mark.advice(
    "UnsupportedModelError: _refuse_optimizers",
    "UnsupportedModelError: _refuse_pruning",
    "UnsupportedModelError: _add_collection _kernels _merge _held_block",
    "InvalidArgumentError: _sharded",
)
@pytest.mark.parametrize("kind", ["ema", "ensemble", "global decay", "prunes", "data type"])
def test_what_cannot_be_tracked_is_skipped_or_replaced(two_ranks: RankPool, kind: str) -> None:
    two_ranks.run(f"{_CASES}:unsupported", kind=kind)


@pytest.mark.advice(
    "UnsupportedModelError: refuse_unrecoverable",
    "UnsupportedModelError: _specs table_states",
    "UnfinishedStepError: ConsumerHandle.wait_for_updates",
)
@pytest.mark.parametrize("kind", ["counters", "state", "in progress"])
def test_what_cannot_be_published_with_states_is_published_without(
    one_rank: RankPool, tmp_path: Path, kind: str
) -> None:
    one_rank.run(f"{_CASES}:unrecoverable", url=f"file://{tmp_path}", kind=kind)
