"""Cases for counters whose state belongs to each rank: saved and restored on every rank, or refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torchmetrics
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryPrecision,
    BinaryPrecisionRecallCurve,
    MulticlassConfusionMatrix,
)

from delta_tracker import ModelDeltaTracker
from delta_tracker.integrations.dcp import SavedTracker
from tests.models import Spec, Table, shard
from tests.publisher.publishing_cases import attempt
from tests.tracker.checkpointing_cases import Total, renamed


class Average(torchmetrics.Metric):
    """A state that is the mean over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: torch.Tensor) -> None:
        self.seen += value

    def compute(self) -> torch.Tensor:
        return self.seen


def product(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.prod(dim=0)


class Product(torchmetrics.Metric):
    """A state with a reduction of its own."""

    def __init__(self, reduction: Any = product) -> None:
        super().__init__()
        self.add_state("seen", torch.tensor(1.0), dist_reduce_fx=reduction)

    def update(self, value: torch.Tensor) -> None:
        self.seen *= value

    def compute(self) -> torch.Tensor:
        return self.seen


class Power:
    """A reduction that is an object, whose text has its address."""

    def __call__(self, stacked: torch.Tensor) -> torch.Tensor:
        return stacked.prod(dim=0)


def new_partial(**arguments: Any) -> Any:
    """Return a partial of a new function, as another process has it: at another address."""

    def scaled(stacked: torch.Tensor, **arguments: Any) -> torch.Tensor:
        return stacked.sum(dim=0)

    return partial(scaled, **arguments)


class Last(Product):
    """A product with a buffer that is not a state and that each update changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def update(self, value: torch.Tensor) -> None:
        super().update(value)
        self.last.fill_(value)


class Pieces(torchmetrics.Metric):
    """A list of tensors of different lengths, which is not reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx=None)

    def update(self, value: torch.Tensor) -> None:
        self.seen.append(torch.arange(int(value)))

    def compute(self) -> torch.Tensor:
        return torch.tensor([len(each) for each in self.seen]).sum()


_REDUCED = {"sum": torchmetrics.SumMetric, "mean": torchmetrics.MeanMetric, "cat": torchmetrics.CatMetric}
_UNREDUCED = {"average": Average, "product": Product, "pieces": Pieces, "pearson": torchmetrics.PearsonCorrCoef}
KINDS: dict[str, Any] = {**_REDUCED, **_UNREDUCED}


def count(counters: dict[str, Any], values: list[float]) -> None:
    for value in values:
        for name, counter in counters.items():
            arguments = [torch.tensor([value, 2.0]), torch.tensor([1.0, value**2])] if name == "pearson" else [value]
            counter.update(*arguments)


def held(counters: dict[str, Any]) -> dict[str, Any]:
    """Return the states of this rank: lists as lists, but those of cat as one."""
    found: dict[str, Any] = {}
    for name, counter in counters.items():
        for field in counter._defaults:
            state = getattr(counter, field)
            if isinstance(state, list):
                state = [each.reshape(-1).tolist() for each in state]
                found[f"{name}.{field}"] = [each for piece in state for each in piece] if name == "cat" else state
            else:
                found[f"{name}.{field}"] = state.tolist()
        found[f"{name} updates"] = counter._update_count
    return found


def totals(counters: dict[str, Any]) -> dict[str, Any]:
    """Return the values over all ranks, which torchmetrics computes with collectives."""
    # torchmetrics gathers lists element by element, which fails if ranks have different numbers of them.
    return {name: counter.compute().tolist() for name, counter in counters.items() if name != "pieces"}


def values_of(rank: int) -> list[float]:
    """Return what a rank counts: other values, and more of them, than a lower rank."""
    return [float(10 * rank + each) for each in range(1, rank + 3)]


def counting_model() -> tuple[Any, ModelDeltaTracker, dict[str, Any]]:
    model = shard(Spec([Table("t", 6, "row")]))
    tracker, counters = ModelDeltaTracker(model), {name: kind() for name, kind in KINDS.items()}
    for name, counter in counters.items():
        tracker.register_counter(name, counter)
    return model, tracker, counters


def rank_states(rank: int, world_size: int, path: str) -> list[Any]:
    """Return what this rank holds and the totals: before a save with DCP, after a load, and after another round."""
    seen = []
    for number in range(3):
        model, tracker, counters = counting_model()
        if number:
            count(counters, [5.0, 7.0])  # a load replaces these
            source = f"{path}/{number - 1}"
            dcp.load({"model": model, "tracker": SavedTracker(tracker, source)}, checkpoint_id=source)
        else:
            count(counters, values_of(rank))
        seen.append([held(counters), totals(counters)])
        dcp.save({"model": model, "tracker": tracker}, checkpoint_id=f"{path}/{number}")
        tracker.detach()
    return seen


def loaded_elsewhere(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Load what another number of ranks saved: states that are reduced, and states that are not."""
    model = shard(Spec([Table("t", 6, "row")]))
    reduced = {name: kind() for name, kind in _REDUCED.items()}
    tracker = ModelDeltaTracker(model)
    for name, counter in reduced.items():
        tracker.register_counter(name, counter)
    dcp.load({"model": model, "tracker": SavedTracker(tracker, f"{path}/reduced")}, checkpoint_id=f"{path}/reduced")
    _, tracker, counters = counting_model()
    count(counters, [3.0])
    before = held(counters)
    state = {"model": model, "tracker": SavedTracker(tracker, f"{path}/all")}
    message = attempt(lambda: dcp.load(state, checkpoint_id=f"{path}/all"))
    assert held(counters) == before
    assert tracker.restored is None
    return {"totals": totals(reduced), "refused": message}


def saved_for_elsewhere(rank: int, world_size: int, path: str) -> dict[str, Any]:
    model, tracker, counters = counting_model()
    count(counters, values_of(rank))
    dcp.save({"model": model, "tracker": tracker}, checkpoint_id=f"{path}/all")
    reduced = ModelDeltaTracker(model)
    for name in _REDUCED:
        reduced.register_counter(name, counters[name])
    dcp.save({"model": model, "tracker": reduced}, checkpoint_id=f"{path}/reduced")
    return totals({name: counters[name] for name in _REDUCED})


class Stubborn(Total):
    """Its load fails after it has begun."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]
        if state["total"] == 13:
            raise OverflowError("13")


def unlike_counters(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors of loading a counter that is not the one that was saved; nothing is loaded."""
    pairs: dict[str, tuple[Any, Any]] = {
        "class": (torchmetrics.SumMetric(), torchmetrics.MaxMetric()),
        "class with the same states": (BinaryAccuracy(), BinaryPrecision()),
        "shape": (MulticlassConfusionMatrix(3), MulticlassConfusionMatrix(4)),
        "number of thresholds": (BinaryPrecisionRecallCurve(thresholds=5), BinaryPrecisionRecallCurve(thresholds=7)),
        "thresholds": (
            BinaryPrecisionRecallCurve(thresholds=[0.1, 0.5]),
            BinaryPrecisionRecallCurve(thresholds=[0.2, 0.5]),
        ),
        "no thresholds": (BinaryPrecisionRecallCurve(thresholds=5), BinaryPrecisionRecallCurve()),
        "no metric": (torchmetrics.SumMetric(), Total()),
        "a metric": (Total(), torchmetrics.SumMetric()),
        "reduction": (Average(), _summed_average()),
        "argument of a reduction": (Product(new_partial(dims=(0, 1))), Product(new_partial(dims=(0, 2)))),
    }
    model = shard(Spec([Table("t", 6, "row")]))
    messages = {}
    for name, (saved, loaded) in pairs.items():
        source, target = ModelDeltaTracker(model), ModelDeltaTracker(model)
        source.register_counter("counter", saved)
        kept = torchmetrics.SumMetric()
        kept.update(3.0)
        source.register_counter("kept", torchmetrics.SumMetric())
        target.register_counter("kept", kept)
        target.register_counter("counter", loaded)
        state = source.state_dict()
        target.mark_changed("ec.embeddings.t", torch.tensor([2]))
        messages[name] = attempt(partial(target.load_state_dict, state))
        assert kept.sum_value == 3, name
        assert target.num_pending() == {"ec.embeddings.t": 1}, name
    messages["load"] = _failed_load(model)
    return messages


def alike_counters(rank: int, world_size: int) -> dict[str, Any]:
    """Return what is held after loading a counter of the same kind: another object, with other updates."""
    pairs = {
        "partial": [Product(new_partial(factor=2, dims=(0, 1), kind=torch.float32, by=Power())) for _ in range(2)],
        "object": [Product(Power()) for _ in range(2)],
        "changed buffer": [Last() for _ in range(2)],
    }
    model = shard(Spec([Table("t", 6, "row")]))
    found: dict[str, Any] = {}
    for name, counters in pairs.items():
        source, target = trackers = [ModelDeltaTracker(model) for _ in counters]
        for number, (tracker, counter) in enumerate(zip(trackers, counters, strict=True)):
            tracker.register_counter("counter", counter)
            if number == 0:
                counter.update(7.0)
        assert attempt(partial(target.load_state_dict, source.state_dict())) == "nothing was raised", name
        assert source.checkpoint.description() == target.checkpoint.description(), name
        found[name] = [float(counter.seen) for counter in counters]
    return found


def damaged_length(rank: int, world_size: int) -> list[str]:
    """Return the errors of loading a list that is longer in the header than in the part."""
    model = shard(Spec([Table("t", 6, "row")]))
    tracker, counter = ModelDeltaTracker(model), Pieces()
    tracker.register_counter("counter", counter)
    counter.update(3.0)
    messages = []
    for length in (10**5, 10**10):
        state = renamed(tracker.state_dict(), '"seen.length": 1', f'"seen.length": {length}')
        messages.append(attempt(partial(tracker.load_state_dict, state)))
        assert [each.tolist() for each in counter.seen] == [[0, 1, 2]]
        assert len(messages[-1]) < 1000, len(messages[-1])  # otherwise the next one fills the memory
    return messages


def _summed_average() -> torchmetrics.Metric:
    metric = Average()
    metric._reductions["seen"] = torchmetrics.utilities.data.dim_zero_sum
    return metric


def _failed_load(model: Any) -> str:
    source, target = ModelDeltaTracker(model), ModelDeltaTracker(model)
    kept, first, second = torchmetrics.SumMetric(), Total(), Stubborn()
    saved = (torchmetrics.SumMetric(), Total(), Stubborn())
    for tracker, counters in ((source, saved), (target, (kept, first, second))):
        for name, counter in zip(("kept", "first", "second"), counters, strict=True):
            counter.total = 13
            tracker.register_counter(name, counter)
    kept.update(3.0)
    first.total = second.total = 5
    target.mark_changed("ec.embeddings.t", torch.tensor([2]))
    message = "nothing was raised"
    try:
        target.load_state_dict(source.state_dict())
    except OverflowError as error:
        message = f"OverflowError: {error}"
    assert (kept.sum_value, first.total, second.total) == (3, 5, 5)
    assert target.num_pending() == {"ec.embeddings.t": 1}
    return message


def collections_of_metrics(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors of registering what holds metrics."""
    model = shard(Spec([Table("t", 6, "row")]))
    made: dict[str, Any] = {
        "collection": torchmetrics.MetricCollection([torchmetrics.SumMetric()]),
        "minmax": torchmetrics.MinMaxMetric(torchmetrics.SumMetric()),
        "arithmetic": torchmetrics.SumMetric() + 1,
        "tracker": torchmetrics.MetricTracker(torchmetrics.SumMetric()),
        "classwise": torchmetrics.ClasswiseWrapper(torchmetrics.SumMetric()),
    }
    tracker = ModelDeltaTracker(model)
    return {name: attempt(partial(tracker.register_counter, name, each)) for name, each in made.items()}


def gathered(rank: int, world_size: int) -> list[Any]:
    """Gather on rank 0, give every rank the result, and load: each rank has its own states."""
    _, tracker, counters = counting_model()
    count(counters, values_of(rank))
    before = held(counters)
    state: list[Any] = [tracker.state_dict(strategy="gather")]
    dist.broadcast_object_list(state, 0)
    _, tracker, counters = counting_model()
    tracker.load_state_dict(state[0])
    return [before, held(counters)]
