"""Models without sharding: tables of torch's embedding modules are tracked exactly, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Recovery, TopK, TrackingMode, restore
from delta_tracker.errors import InvalidArgumentError, UnsupportedModelError
from tests.ranks import RankPool
from tests.sweeps import SWEEPS_ARE_WHOLE, num_examples

_CASES = "tests.sharding.plain_cases"
_ROWS = 24
_optim = torch.optim

_DENSE: dict[str, Callable[[Iterable[Tensor]], _optim.Optimizer]] = {
    "SGD": lambda params: _optim.SGD(params, lr=0.1),
    "SGD with momentum and decay": lambda params: _optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda params: _optim.Adagrad(params, lr=0.1),
    "Adam": lambda params: _optim.Adam(params, lr=0.1, foreach=True),
    "AdamW": lambda params: _optim.AdamW(params, lr=0.1),
    "RMSprop": lambda params: _optim.RMSprop(params, lr=0.1, momentum=0.5),
}


class _Own(_optim.SGD):
    """Optimizer that writes a row that has no gradient."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                group["params"][0][0] += 1
        return result


_SPARSE: dict[str, Callable[[Iterable[Tensor]], _optim.Optimizer]] = {
    "SGD": lambda params: _optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: _optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: _optim.Adagrad(params, lr=0.1, lr_decay=0.1),
    "SparseAdam": lambda params: _optim.SparseAdam(list(params), lr=0.1),
    "own": lambda params: _Own(params, lr=0.1),
}
_KINDS = [
    *((name, False, bag) for name in _DENSE for bag in (False, True)),
    *((name, True, bag) for name in _SPARSE for bag in (False, True)),
]


def _model(*, is_sparse: bool, bag: bool, max_norm: float | None = None) -> nn.ModuleDict:
    torch.manual_seed(3)
    if bag:
        table: nn.Module = nn.EmbeddingBag(_ROWS, 4, sparse=is_sparse, mode="sum", max_norm=max_norm)
    else:
        table = nn.Embedding(_ROWS, 4, sparse=is_sparse, padding_idx=1, max_norm=max_norm)
    return nn.ModuleDict({"user": table})


@dataclass
class _Run:
    """Trainer, publisher and predictor of one table, with the rows that any write may have changed."""

    is_sparse: bool
    bag: bool
    optimizer: str
    mode: TrackingMode
    url: str
    touched: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)  # rows of a step that raised, which are sent until the next step

    def __post_init__(self) -> None:
        self.model = _model(is_sparse=self.is_sparse, bag=self.bag)
        self.served = _model(is_sparse=False, bag=self.bag)
        make = (_SPARSE if self.is_sparse else _DENSE)[self.optimizer]
        self.optim = make(self.model.parameters())
        self.tracker = ModelDeltaTracker(self.model, ["stream", "audit"], mode=self.mode)
        self.publisher = Publisher(self.tracker, self.url, "stream")
        self.publisher.snapshot()
        self.predictor = Predictor(self.served, self.url)
        self.predictor.sync()
        self.audited = self.weight.clone()

    @property
    def weight(self) -> Tensor:
        return self.model["user"].weight.detach()  # type: ignore[union-attr]

    def do(self, action: str, ids: list[int]) -> None:
        getattr(self, f"_{action}")(ids)

    def check(self) -> None:
        """Compare a read of a consumer and a version of the stream with the rows that changed."""
        delta = self.tracker.get_delta("audit")["user"]
        got = set(delta.ids.tolist())
        changed = set((self.weight.view(torch.int32) != self.audited.view(torch.int32)).any(1).nonzero()[:, 0].tolist())
        assert changed <= got, "an update is lost"
        assert got <= (changed if not self.is_sparse else self.touched), "a row is sent that no step wrote"
        if delta.states is not None:
            is_known = ~delta.states.isnan().any(1)
            assert torch.equal(delta.states[is_known], self.audited[delta.ids[is_known]])
        self.audited, self.touched = self.weight.clone(), set(self.open)
        version = self.publisher.publish()
        assert self.predictor.sync() >= 1
        assert version.version == self.predictor.version
        assert torch.equal(self.served["user"].weight.view(torch.int32), self.weight.view(torch.int32))  # type: ignore[union-attr, operator]

    def _loss(self, ids: list[int]) -> Tensor:
        found: Tensor = self.model["user"](torch.tensor([ids]))
        return (found * torch.arange(1.0, 5.0)).sum()

    def _backward(self, ids: list[int]) -> None:
        self._loss(ids).backward()

    def _step(self, ids: list[int]) -> None:
        del ids
        gradient = self.model["user"].weight.grad  # type: ignore[union-attr]
        self.open = set()
        self._wrote(gradient)
        self.optim.step()
        self.tracker.step()

    def _closure(self, ids: list[int]) -> None:
        def closure() -> Tensor:
            self.optim.zero_grad()
            loss = self._loss(ids)
            loss.backward()
            self._wrote(self.model["user"].weight.grad)  # type: ignore[union-attr, arg-type]
            return loss

        self.open = set()
        self.optim.step(closure)  # type: ignore[arg-type]

    def _wrote(self, gradient: Tensor | None) -> None:
        self.touched |= set(range(_ROWS)) if self.optimizer == "own" else set()
        if gradient is not None and gradient.is_sparse:
            self.seen |= set(gradient._indices()[0].tolist())
            self.touched |= self.seen if "momentum" in self.optimizer else set(gradient._indices()[0].tolist())

    def _zero(self, ids: list[int]) -> None:
        del ids
        self.optim.zero_grad()

    def _evaluate(self, ids: list[int]) -> None:
        with torch.no_grad():
            self._loss(ids)

    def _edit(self, ids: list[int]) -> None:
        with torch.no_grad():
            self.model["user"].weight[ids[0]] += 1  # type: ignore[union-attr, index, operator]
        self.touched |= set(range(_ROWS))

    def _load(self, ids: list[int]) -> None:
        state = {"user.weight": self.weight + float(ids[0])}
        self.model.load_state_dict(state)
        self.touched |= set(range(_ROWS))

    def _failing(self, ids: list[int]) -> None:
        handle = self.optim.register_step_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            self.optim.step()
        handle.remove()
        before = self.touched
        self.touched = set()
        self._wrote(self.model["user"].weight.grad)  # type: ignore[union-attr, arg-type]
        self.open, self.touched = self.touched, self.touched | before

    def _hooked(self, ids: list[int]) -> None:
        """Step with a gradient that a hook of the optimizer replaces after the tracker has seen it."""

        def replace(*args: object) -> None:
            self.optim.zero_grad()
            self._backward(ids)

        handle = self.optim.register_step_pre_hook(replace)
        self.open = set()
        self.optim.step()
        handle.remove()
        self._wrote(self.model["user"].weight.grad)  # type: ignore[union-attr, arg-type]
        self.touched |= set(range(_ROWS))

    def _stream(self, ids: list[int]) -> None:
        del ids
        self.check()


def _fail(*args: object) -> None:
    raise ZeroDivisionError


_ACTIONS = ["backward", "step", "step", "closure", "zero", "evaluate", "edit", "load", "failing", "hooked", "stream"]
# Each kind of write by itself, because only few random schedules read directly after one.
_EACH_WRITE = [
    *[("backward", [5]), ("edit", [7]), ("step", [0]), ("stream", [0])],
    *[("backward", [5, 6]), ("load", [7]), ("step", [0]), ("stream", [0])],
    *[("closure", [8, 9]), ("stream", [0]), ("hooked", [10]), ("stream", [0])],
    *[("zero", [0]), ("backward", [11]), ("step", [0]), ("stream", [0])],
    *[("backward", [12]), ("failing", [0]), ("stream", [0]), ("step", [0])],
]


@pytest.mark.sweep("short")
@pytest.mark.promise("lossless", "minimal", "equal")
@pytest.mark.parametrize(("optimizer", "is_sparse", "bag"), _KINDS)
def test_random_schedules_lose_no_update_and_send_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, is_sparse: bool, bag: bool
) -> None:
    @settings(max_examples=24 if SWEEPS_ARE_WHOLE else num_examples(3), deadline=None)
    @given(
        st.sampled_from([TrackingMode.ID_ONLY, TrackingMode.EMBEDDING]),
        st.lists(
            st.tuples(st.sampled_from(_ACTIONS), st.lists(st.integers(0, _ROWS - 1), min_size=1, max_size=4)),
            min_size=3,
            max_size=16,
        ),
    )
    @example(TrackingMode.ID_ONLY, _EACH_WRITE)
    @example(TrackingMode.EMBEDDING, _EACH_WRITE)
    def check(mode: TrackingMode, actions: list[tuple[str, list[int]]]) -> None:
        run = _Run(is_sparse, bag, optimizer, mode, f"file://{tmp_path_factory.mktemp('stream')}")
        for action, ids in [("backward", [2, 3]), ("step", [2]), *actions]:
            run.do(action, ids)
        run.check()
        run.publisher.close()

    check()


def test_a_table_with_max_norm_is_compared() -> None:
    model = _model(is_sparse=True, bag=False, max_norm=0.5)
    tracker = ModelDeltaTracker(model)
    model["user"](torch.tensor([4]))  # rescales the row
    assert tracker.get_delta_ids()["user"].tolist() == [4]


def test_a_sparse_table_takes_no_copy() -> None:
    sparse = ModelDeltaTracker(_model(is_sparse=True, bag=True)).memory()
    dense = ModelDeltaTracker(_model(is_sparse=False, bag=True)).memory()
    assert (sparse.copy_bytes, dense.copy_bytes) == (0, _ROWS * 4 * 4)


def test_weights_that_two_modules_share_are_two_tables() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(_ROWS, 4, sparse=True), "b": nn.Embedding(_ROWS, 4, sparse=True)})
    model["b"].weight = model["a"].weight
    tracker = ModelDeltaTracker(model)
    model["b"](torch.tensor([5])).sum().backward()
    _optim.SGD(model.parameters(), lr=0.1).step()
    assert {fqn: ids.tolist() for fqn, ids in tracker.get_delta_ids().items()} == {"a": [5], "b": [5]}


def test_an_optimizer_that_is_not_known_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = _model(is_sparse=True, bag=True)
    tracker = ModelDeltaTracker(model)
    optimizer = _Own(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model["user"](torch.tensor([[4]])).sum().backward()
            optimizer.step()
    assert tracker.get_delta_ids()["user"].tolist() == list(range(_ROWS))
    assert sum("after the optimizer _Own; " in record.message for record in caplog.records) == 1


def test_replaced_weights_are_all_sent() -> None:
    model = _model(is_sparse=True, bag=True)
    tracker = ModelDeltaTracker(model)
    model["user"].weight = nn.Parameter(torch.zeros(_ROWS, 4))
    assert len(tracker.get_delta_ids()["user"]) == _ROWS
    model["user"](torch.tensor([[4]])).sum().backward()
    _optim.SGD(model.parameters(), lr=0.1).step()
    assert tracker.get_delta_ids()["user"].tolist() == [4]


@pytest.mark.promise("lossless")
def test_an_empty_gradient_does_not_hide_the_write_of_a_hook() -> None:
    model = _model(is_sparse=True, bag=True)
    optimizer = _optim.SparseAdam(list(model.parameters()), lr=0.1)
    tracker = ModelDeltaTracker(model)
    empty = torch.empty(0, dtype=torch.long)
    model["user"](empty, torch.tensor([0])).sum().backward()
    assert model["user"].weight.grad._values().numel() == 0  # type: ignore[union-attr, operator]
    before = model["user"].weight.detach().clone()  # type: ignore[union-attr, operator]

    def edit(*_: object) -> None:
        with torch.no_grad():
            model["user"].weight[5].add_(1)  # type: ignore[union-attr, index, operator]  # one write

    handle = optimizer.register_step_pre_hook(edit)
    optimizer.step()
    handle.remove()
    assert (model["user"].weight != before).any(1).nonzero().flatten().tolist() == [5]  # type: ignore[union-attr, operator]
    assert 5 in tracker.get_delta()["user"].ids.tolist()
    optimizer.step()
    assert tracker.get_delta()["user"].ids.tolist() == []


@pytest.mark.promise("minimal")
def test_rows_of_a_step_that_raised_are_sent_once() -> None:
    model = _model(is_sparse=True, bag=True)
    optimizer = _optim.SGD(model.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(model)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    model["user"](torch.tensor([[3, 4]])).sum().backward()
    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    optimizer.zero_grad()
    model["user"](torch.tensor([[5]])).sum().backward()
    optimizer.step()
    assert tracker.get_delta()["user"].ids.tolist() == [3, 4, 5]  # the failed step may have written its rows
    assert tracker.get_delta()["user"].ids.tolist() == []


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_assigned_data_is_sent(is_sparse: bool) -> None:
    model = _model(is_sparse=is_sparse, bag=True)
    tracker = ModelDeltaTracker(model)
    model["user"].weight.data = torch.ones(_ROWS, 4)  # type: ignore[union-attr]
    assert tracker.get_delta()["user"].ids.tolist() == list(range(_ROWS))
    assert tracker.get_delta()["user"].ids.tolist() == []


@pytest.mark.promise("supported")
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: model.update({"user": nn.EmbeddingBag(_ROWS, 4)}), "its module was replaced in the model"),
        (lambda model: model.half(), r"its weight is now \(24, 4\) float16 on cpu, and was \(24, 4\) float32 on cpu"),
        (lambda model: setattr(model["user"].weight, "data", torch.ones(3, 4)), r"its weight is now \(3, 4\)"),
        (lambda model: model["user"].register_parameter("weight", None), "its weight is now missing"),
    ],
    ids=["replaced", "cast", "resized", "removed"],
)
def test_a_table_that_is_no_longer_the_one_that_was_tracked_is_refused(
    tmp_path: Path, is_sparse: bool, change: Callable[[nn.ModuleDict], object], reason: str
) -> None:
    model = _model(is_sparse=is_sparse, bag=True)
    tracker = ModelDeltaTracker(model)
    with Publisher(tracker, tmp_path) as publisher:
        publisher.snapshot()
        change(model)
        for read in (publisher.publish, publisher.snapshot):
            with pytest.raises(
                UnsupportedModelError, match=rf"can no longer be tracked: 'user' \({reason}.*Call tracker.reattach"
            ):
                read()
    with pytest.raises(UnsupportedModelError, match=reason):
        tracker.get_delta()
    tracker.detach()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method.:DeprecationWarning")  # the compiler's own code
def test_compiled_steps_lose_no_update() -> None:
    model = _model(is_sparse=False, bag=True)
    sparse = nn.Embedding(_ROWS, 4, sparse=True)
    model["item"] = sparse
    tracker = ModelDeltaTracker(model)
    optimizers = [_optim.SGD([model["user"].weight], lr=0.1), _optim.SGD([sparse.weight], lr=0.1)]

    @torch.compile(backend="eager")
    def steps() -> None:
        for optimizer in optimizers:
            optimizer.step()

    before = {fqn: rows.clone() for fqn, rows in tracker.read_tables().items()}
    model["user"](torch.tensor([[4]])).sum().backward()
    sparse(torch.tensor([6])).sum().backward()
    steps()
    delta = tracker.get_delta_ids()
    for fqn, rows in tracker.read_tables().items():
        changed = (rows != before[fqn]).any(1).nonzero()[:, 0].tolist()
        assert changed
        assert set(changed) <= set(delta[fqn].tolist())


def test_top_k_and_modes() -> None:
    model = _model(is_sparse=True, bag=True)
    tracker = ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING)
    model["user"](torch.tensor([[4, 4, 7]])).sum().backward()
    _optim.SGD(model.parameters(), lr=0.1).step()
    assert tracker.get_delta(top_k=TopK(rows=1))["user"].ids.tolist() == [4]  # moved twice as far
    assert tracker.get_delta()["user"].ids.tolist() == [7]
    with pytest.raises(UnsupportedModelError, match="keeps no state per row inside the kernel"):
        ModelDeltaTracker(model, mode=TrackingMode.MOMENTUM_LAST)


@pytest.mark.promise("lossless", "equal")
@pytest.mark.parametrize("place", ["before", "after", "closure"])
@pytest.mark.parametrize("optimizer", sorted(set(_SPARSE) - {"own"}))
def test_writes_inside_a_step_that_are_not_the_optimizers_are_sent(tmp_path: Path, optimizer: str, place: str) -> None:
    run = _Run(is_sparse=True, bag=True, optimizer=optimizer, mode=TrackingMode.ID_ONLY, url=f"file://{tmp_path}")

    def limit(*args: object) -> None:
        del args
        with torch.no_grad():
            run.model["user"].weight.clamp_(-0.5, 0.5)  # type: ignore[union-attr, operator]

    def closure() -> Tensor:
        limit()
        loss = run._loss([7, 9])
        loss.backward()
        return loss

    if place == "closure":
        run.optim.step(closure)  # type: ignore[arg-type]
    else:
        (run.optim.register_step_pre_hook if place == "before" else run.optim.register_step_post_hook)(limit)
        run._backward([7, 9])
        run.optim.step()
    run.tracker.step()
    run.publisher.publish()
    run.predictor.sync()
    assert torch.equal(run.served["user"].weight, run.weight)  # type: ignore[arg-type]


@pytest.mark.promise("supported")
def test_what_cannot_be_tracked_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"nn\.Embedding"):
        ModelDeltaTracker(nn.Linear(2, 2))
    with pytest.raises(InvalidArgumentError, match="lookups"):
        ModelDeltaTracker(_model(is_sparse=True, bag=True), record="lookups")
    with pytest.raises(UnsupportedModelError, match="Pass a model that contains it"):
        ModelDeltaTracker(nn.Embedding(2, 2))
    whole = _model(is_sparse=False, bag=True)
    with pytest.raises(InvalidArgumentError, match=r"'user\.weight'"):
        Publisher(ModelDeltaTracker(whole), f"file://{tmp_path}", dense=["user.weight"]).snapshot()
    halved = _model(is_sparse=False, bag=False).double()
    with pytest.raises(UnsupportedModelError, match=r"'user'.*float64"):
        ModelDeltaTracker(halved)
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match=r"'user'.*meta device"):
        ModelDeltaTracker(_model(is_sparse=False, bag=False))
    parametrized = _model(is_sparse=False, bag=False)
    nn.utils.parametrizations.weight_norm(parametrized["user"])
    with pytest.raises(UnsupportedModelError, match=r"'user'.*parametrized"):
        ModelDeltaTracker(parametrized)
    with pytest.warns(UserWarning, match="leaves no table to track"):
        assert not ModelDeltaTracker(parametrized, fqns_to_skip=["user"]).tables


def test_dense_parameters_leave_out_the_tables(tmp_path: Path) -> None:
    model = nn.Sequential(nn.EmbeddingBag(_ROWS, 4), nn.Linear(4, 1))
    served = nn.Sequential(nn.EmbeddingBag(_ROWS, 4), nn.Linear(4, 1))
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, f"file://{tmp_path}", dense=model)
    version = publisher.snapshot()
    assert sorted(version.dense) == ["1.bias", "1.weight"]
    predictor = Predictor(served, f"file://{tmp_path}")
    predictor.sync()
    assert all(torch.equal(a, b) for a, b in zip(served.parameters(), model.parameters(), strict=True))


@pytest.mark.promise("resumed")
@pytest.mark.parametrize("is_sparse", [False, True])
def test_training_continues_bit_for_bit_after_a_restore(tmp_path: Path, is_sparse: bool) -> None:
    url = f"file://{tmp_path}"

    def build() -> tuple[nn.ModuleDict, dict[str, _optim.Optimizer]]:
        model = _model(is_sparse=is_sparse, bag=True)
        model["over"] = nn.Linear(4, 1)
        sparse = _optim.SparseAdam if is_sparse else _optim.RMSprop
        table = sparse(list(model["user"].parameters()), lr=0.1)
        return model, {"table": table, "over": _optim.Adam(model["over"].parameters(), lr=0.1)}

    def train(model: nn.ModuleDict, optimizers: dict[str, _optim.Optimizer], batch: int) -> None:
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        model["over"](model["user"](torch.tensor([[batch, batch + 3]]))).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()

    model, optimizers = build()
    tracker = ModelDeltaTracker(model)
    with closing(Publisher(tracker, url, recovery=Recovery(training_state=optimizers))) as publisher:
        for batch in range(4):
            publisher.publish()
            train(model, optimizers, batch)
            tracker.step()
        publisher.publish()
    resumed, resumed_optimizers = build()
    for parameter in resumed.parameters():
        nn.init.zeros_(parameter)
    recovery = Recovery(training_state=resumed_optimizers)
    restored = restore(resumed, url, tracker=ModelDeltaTracker(resumed), recovery=recovery)
    assert restored is not None
    assert restored.num_batches == 4
    for batch in range(4, 8):
        train(model, optimizers, batch)
        train(resumed, resumed_optimizers, batch)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_a_sparse_momentum_is_refused_in_training_states(tmp_path: Path) -> None:
    model = _model(is_sparse=True, bag=True)
    optimizer = _optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model["user"](torch.tensor([[4]])).sum().backward()
    optimizer.step()
    tracker = ModelDeltaTracker(model)
    tracker.step()
    with pytest.raises(InvalidArgumentError, match=r"momentum_buffer.*plain dense tensors"):
        Publisher(tracker, f"file://{tmp_path}", recovery=Recovery(training_state={"o": optimizer}))


def test_beside_sharded_collections_they_are_named_and_not_tracked(one_rank: RankPool) -> None:
    assert one_rank.run("tests.sharding.plain_beside_cases:beside") == [["ec.embeddings.t"]]


@pytest.mark.promise("equal", "restored")
@pytest.mark.parametrize("case", ["replicas", "publishes", "not_replicated", "sharded_by_torch", "checkpoint"])
def test_ranks(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}")
