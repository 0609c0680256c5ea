"""Cases for states that are loaded three times, with every metric of torchmetrics that simple arguments construct."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, RankCounters
from tests.tracker.rank_states_cases import KINDS

_ARGUMENTS: dict[str, Any] = {
    "task": "binary",
    "num_classes": 3,
    "num_labels": 3,
    "num_groups": 2,
    "beta": 2.0,
    "p": 3.0,
    "min_precision": 0.5,
    "min_recall": 0.5,
    "min_sensitivity": 0.5,
    "things": {0, 1},
    "stuffs": {2},
}
# Their constructors download models.
_WITH_MODELS = {
    *("BERTScore", "CLIPScore", "InfoLM", "InceptionScore", "LearnedPerceptualImagePatchSimilarity"),
    *("FrechetInceptionDistance", "KernelInceptionDistance", "MemorizationInformedFrechetInceptionDistance"),
}
_WORDS = ["the cat sat on the mat", "a dog ran far away", "birds sing at dawn"]


def _probabilities(draw: torch.Generator) -> Tensor:
    return torch.rand(8, 3, generator=draw).softmax(dim=1)


def _bits(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(2, shape or (8,), generator=draw)


def _scores(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape or (8,), generator=draw)


def _classes(draw: torch.Generator) -> Tensor:
    return torch.randint(3, (8,), generator=draw)


def _words(draw: torch.Generator) -> str:
    return _WORDS[int(torch.randint(3, (1,), generator=draw))]


def _answers(draw: torch.Generator) -> list[Any]:
    answer = {"answers": {"answer_start": [0], "text": [_words(draw)]}, "id": "1"}
    return [{"prediction_text": _words(draw), "id": "1"}, answer]


def _segments(draw: torch.Generator) -> Tensor:
    return torch.randint(3, (1, 5, 5, 2), generator=draw)


# Arguments of update(); a metric gets the first that it accepts.
_UPDATES: list[Callable[[torch.Generator], list[Any]]] = [
    lambda draw: [_scores(draw), _bits(draw)],
    lambda draw: [_scores(draw), _scores(draw)],
    lambda draw: [_probabilities(draw), _classes(draw)],
    lambda draw: [_scores(draw, 8, 3), _bits(draw, 8, 3)],
    lambda draw: [_classes(draw), _classes(draw)],
    lambda draw: [_probabilities(draw), _probabilities(draw)],
    lambda draw: [_scores(draw), _bits(draw), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])],
    lambda draw: [1 + 3 * float(_scores(draw, 1))],
    lambda draw: [_scores(draw, 2, 3, 32, 32), _scores(draw, 2, 3, 32, 32)],
    lambda draw: [_scores(draw, 2, 1, 32, 32), _scores(draw, 2, 1, 32, 32)],
    lambda draw: [_scores(draw, 1, 1, 192, 192), _scores(draw, 1, 1, 192, 192)],
    lambda draw: [_scores(draw, 2, 3, 32, 32)],
    lambda draw: [_scores(draw, 2, 8, 3), torch.randint(3, (2, 8), generator=draw)],
    lambda draw: [_segments(draw), _segments(draw)],
    lambda draw: [[_words(draw)], [_words(draw)]],
    lambda draw: [[_words(draw)], [[_words(draw)]]],
    _answers,
]


_NUMBER = _UPDATES[7]


class Adopting:
    """A counter whose ``merge`` returns a tensor of a state, and which writes in place to the tensor that it loads."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def merge(self, states: Any) -> Any:
        first = states[0] if states else {"total": torch.zeros(2)}
        for state in states[1:]:
            first["total"] += state["total"]
        return first

    def load_state_dict(self, state: Any) -> None:
        self.total = state["total"]

    def update(self, value: float) -> None:
        self.total += value

    def compute(self) -> Tensor:
        return self.total.clone()


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _metric_classes() -> list[type]:
    for module in pkgutil.walk_packages(torchmetrics.__path__, "torchmetrics."):
        importlib.import_module(module.name)
    found = set(_subclasses(torchmetrics.Metric)) | set(KINDS.values())
    return sorted(
        (kind for kind in found if kind.__name__[0] != "_" and kind.__name__ not in _WITH_MODELS),
        key=lambda kind: f"{kind.__name__} {kind.__module__}",
    )


def _built(kind: Any) -> Any:
    """Return a metric whose ``compute`` is not a collective; None if it needs other arguments or packages."""
    parameters = inspect.signature(kind.__new__ if "task" in inspect.signature(kind.__new__).parameters else kind)
    known = {name: value for name, value in _ARGUMENTS.items() if name in parameters.parameters}
    for arguments in ({}, known):
        try:
            metric = kind(**arguments)
            RankCounters({"metric": metric})
        except (TypeError, ValueError, ModuleNotFoundError):  # also InvalidArgumentError: it has inner metrics
            continue
        metric.sync_on_compute = metric._to_sync = False
        return metric
    return None


def _update_of(kind: Any) -> Callable[[torch.Generator], list[Any]] | None:
    """Return the arguments of ``update`` that a metric accepts; None if it has none."""
    for arguments in _UPDATES:
        metric, draw = _built(kind), torch.Generator().manual_seed(0)
        if metric is None:
            return None
        try:
            for _ in range(2):
                metric.update(*arguments(draw))
                metric.compute()
        except Exception:  # noqa: BLE001  the metric refuses these arguments
            continue
        return arguments
    return None


@cache
def _accepted() -> list[tuple[str, Any, bool, Callable[[torch.Generator], list[Any]]]]:
    """Return the name of each usable metric, its class, whether its states can be merged, and its arguments."""
    found = []
    for kind in _metric_classes():
        update = _update_of(kind)
        if update is not None:
            reductions = [getattr(each, "__name__", "") for each in _built(kind)._reductions.values()]
            is_merged = all(
                each in ("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat") for each in reductions
            )
            found.append((f"{kind.__module__}.{kind.__name__}", kind, is_merged, update))
    return found


class Counted:
    """Counters of all kinds, by name, with the arguments of their updates."""

    def __init__(self, *, cannot_merge: bool = True) -> None:
        self._updates: dict[str, Callable[[torch.Generator], list[Any]]] = {}
        self.counters: dict[str, Any] = {}
        for name, kind, is_merged, update in _accepted():
            if is_merged or cannot_merge:
                self._updates[name], self.counters[name] = update, _built(kind)
        self._updates["adopting"], self.counters["adopting"] = _NUMBER, Adopting()

    def update(self, seed: int) -> None:
        for name, counter in self.counters.items():
            counter.update(*self._updates[name](torch.Generator().manual_seed(seed)))

    def computed(self) -> dict[str, list[Tensor]]:
        """Return the values of all counters, as lists of tensors by name."""
        return {name: list(_tensors(counter.compute())) for name, counter in self.counters.items()}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.clone()
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    else:
        yield torch.tensor(float(value))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() + str(tensor.shape).encode()


def _is_same(left: list[Tensor], right: list[Tensor]) -> bool:
    return list(map(_bytes, left)) == list(map(_bytes, right))


def _saver(kind: str, counted: Counted) -> Any:
    """Return the object of the library that saves and loads counters. A tracker needs a single rank here."""
    if kind == "counters":
        return RankCounters(counted.counters)
    tracker = ModelDeltaTracker(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    for name, counter in counted.counters.items():
        tracker.register_counter(name, counter)
    return tracker


def save(rank: int, world_size: int, path: str) -> None:
    """Save the counters of all ranks that can be merged in one file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted = Counted(cannot_merge=False)
        counted.update(rank)
    state = RankCounters(counted.counters).state_dict(strategy="gather")
    if rank == 0:
        torch.save(state, path)


def load(rank: int, world_size: int, path: str | None = None, saver: str = "counters") -> dict[str, list[str]]:
    """Load one state three times, with updates between. Return the names of the counters that differ, and of all.

    Args:
        path: file of the state; None to save one of all counters first.
        saver: what saves and loads.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns of large buffers and of metrics without updates
        counted = Counted(cannot_merge=path is None)
        holder = _saver(saver, counted)
        counted.update(10 + rank)
        state = holder.state_dict() if path is None else torch.load(path)
        first = counted.computed() if path is None else None  # later: some metrics write to their states here
        kept = {key: _bytes(tensor) for key, tensor in state.items()}
        differing = set()
        rounds = []
        for _ in range(3):
            holder.load_state_dict(state)
            loaded = counted.computed()
            counted.update(100)
            counted.update(101)
            rounds.append((loaded, counted.computed()))
        for name in counted.counters:
            results = [[*loaded[name], *later[name]] for loaded, later in rounds]
            is_first = first is None or _is_same(first[name], rounds[0][0][name])
            if not is_first or not all(_is_same(each, results[0]) for each in results):
                differing.add(name)
    changed = [key for key, tensor in state.items() if _bytes(tensor) != kept[key]]
    return {"names": sorted(counted.counters), "differing": sorted(differing), "changed": changed}
