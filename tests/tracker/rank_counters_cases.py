"""Cases for counters that are saved without a tracker: in a DCP checkpoint, in files, or merged; each on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.distributed import checkpoint as dcp

from delta_tracker import RankCounters
from delta_tracker.integrations.dcp import SavedCounters, SavedTracker
from tests.publisher.publishing_cases import attempt
from tests.tracker.checkpointing_cases import Total
from tests.tracker.rank_states_cases import KINDS, counting_model, held, values_of
from tests.tracker.rank_states_cases import count as count_metrics

_REDUCED: dict[str, Any] = {
    **{name: KINDS[name] for name in ("sum", "mean", "cat")},
    "max": torchmetrics.MaxMetric,
    "min": torchmetrics.MinMetric,
}
Built = tuple[dict[str, Any], Total, RankCounters]


def built(kinds: dict[str, Any] = _REDUCED) -> Built:
    """Return new metrics by name, an object with ``merge``, and all of them as one :class:`RankCounters`."""
    metrics, total = {name: kind() for name, kind in kinds.items()}, Total()
    return metrics, total, RankCounters({**metrics, "total": total})


def count(counters: Built, values: list[float]) -> None:
    metrics, total, _ = counters
    count_metrics(metrics, values)
    total.total += len(values)
    total.names = [*total.names, *map(str, values)]


def seen(counters: Built) -> dict[str, Any]:
    """Return what this rank holds."""
    metrics, total, _ = counters
    return {**held(metrics), "total": total.total, "names": list(total.names)}


def totals(counters: Built) -> dict[str, Any]:
    """Return the values over all ranks; lists are sorted."""
    metrics, total, _ = counters
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (total.total, total.names))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns of ranks without updates, and of an index of its own
        values = {name: metric.compute().reshape(-1).tolist() for name, metric in metrics.items()}
    names = sorted(name for _, names in every for name in names)
    return {**values, "cat": sorted(values["cat"]), "total": sum(each for each, _ in every), "names": names}


def _save_dcp(counters: RankCounters, path: str) -> None:
    dcp.save({"counters": counters, "weight": torch.ones(3)}, checkpoint_id=path)


def _save_async(counters: RankCounters, path: str) -> None:
    dcp.async_save({"counters": counters, "weight": torch.ones(3)}, checkpoint_id=path).result()


def _load_dcp(counters: RankCounters, path: str) -> None:
    dcp.load({"counters": SavedCounters(counters, path), "weight": torch.ones(3)}, checkpoint_id=path)


def _save_file(counters: RankCounters, path: str, strategy: Any = "local") -> None:
    state = counters.state_dict(strategy=strategy)
    if state:
        Path(path).mkdir(parents=True, exist_ok=True)
        save_file(state, f"{path}/{dist.get_rank()}.safetensors")
    dist.barrier()


def _load_files(counters: RankCounters, path: str) -> None:
    files = sorted(Path(path).glob("*.safetensors"))
    counters.load_state_dict({key: each for file in files for key, each in load_file(file).items()})


WAYS: dict[str, tuple[Callable[[RankCounters, str], None], Callable[[RankCounters, str], None]]] = {
    "dcp.save": (_save_dcp, _load_dcp),
    "dcp.async_save": (_save_async, _load_dcp),
    "files": (_save_file, _load_files),
    "gathered": (partial(_save_file, strategy="gather"), _load_files),
    "merged": (partial(_save_file, strategy="merge"), _load_files),
}


def save(rank: int, world_size: int, path: str) -> list[dict[str, Any]]:
    """Count and save in every way; return what this rank holds, and the totals."""
    counters = built()
    count(counters, values_of(rank))
    for way, (save_one, _) in WAYS.items():
        save_one(counters[2], f"{path}/{way}")
    return [seen(counters), totals(counters)]


def load(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Load what each way saved, twice; return what this rank holds and the totals after each, and after more counts."""
    found = {}
    for way, (save_one, load_one) in WAYS.items():
        counters = built()
        count(counters, [5.0, 7.0])  # a load replaces these
        load_one(counters[2], f"{path}/{way}")
        first = [seen(counters), totals(counters)]
        load_one(counters[2], f"{path}/{way}")
        assert [seen(counters), totals(counters)] == first, way
        again = f"{path}/{way} again at {world_size}"
        save_one(counters[2], again)
        load_one(counters[2], again)
        count(counters, [1000.0])
        found[way] = [*first, totals(counters)]
    return found


def unmerged(rank: int, world_size: int) -> dict[str, Any]:
    """States that cannot be merged: each rank has its own again, and a merged save is refused on every rank."""
    counters = built(KINDS)
    count(counters, values_of(rank))
    state, before = counters[2].state_dict(), seen(counters)
    count(counters, [3.0])
    counters[2].load_state_dict(state)
    refused = attempt(partial(counters[2].state_dict, strategy="merge"))
    return {"before": before, "after": seen(counters), "merged": refused}


def refusals(rank: int, world_size: int, path: str) -> dict[str, str]:
    """Return the errors of loads that cannot be exact; no counter changes."""
    counters = built()
    count(counters, values_of(rank))
    every = counters[2].state_dict(strategy="gather")
    objects: list[Any] = [every]
    dist.broadcast_object_list(objects)
    every = objects[0]
    _, tracker, _ = counting_model()
    tracked = tracker.state_dict()
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=f"{path}/none")
    dcp.save({"a": counters[2], "b": counters[2]}, checkpoint_id=f"{path}/two")
    before = seen(counters)
    sums = RankCounters({"sum": torchmetrics.SumMetric()})
    synced = torchmetrics.SumMetric()
    synced.update(1.0)
    others = RankCounters({"synced": synced})
    unsynced = others.state_dict()
    synced.sync(should_sync=True, distributed_available=lambda: True)
    elsewhere = {key.replace(f"of{world_size}/", "of7/"): each for key, each in every.items()}
    actions: dict[str, Callable[[], Any]] = {
        "nothing": lambda: counters[2].load_state_dict({}),
        "another rank's part": lambda: counters[2].load_state_dict(
            {key: each for key, each in every.items() if not key.startswith(f"rank{rank}of")}
        ),
        "no header": lambda: counters[2].load_state_dict({"sum": torch.ones(1)}),
        "another header": lambda: counters[2].load_state_dict(elsewhere),
        "a tracker's state": lambda: counters[2].load_state_dict(tracked),
        "into a tracker": lambda: tracker.load_state_dict(every),
        "other counters": lambda: sums.load_state_dict(every),
        "a lost tensor": lambda: counters[2].load_state_dict(
            {key: each for key, each in every.items() if not key.endswith("sum_value")}
        ),
        "no counters in a checkpoint": lambda: SavedCounters(counters[2], f"{path}/none").state_dict(),
        "two in a checkpoint": lambda: SavedCounters(counters[2], f"{path}/two").state_dict(),
        "a wrong key": lambda: SavedCounters(counters[2], f"{path}/two", "c").state_dict(),
        "strategy": lambda: counters[2].state_dict(strategy="rank 0"),  # type: ignore[arg-type]
        "no counter": lambda: RankCounters({}),
        "a number": lambda: RankCounters({"clicks": 3}),
        "a slash": lambda: RankCounters({"a/b": Total()}),
        "a list": lambda: RankCounters([Total()]),  # type: ignore[arg-type]
        "a synchronized metric": others.state_dict,
        "into a synchronized metric": lambda: others.load_state_dict(unsynced),
    }
    messages = {name: attempt(action) for name, action in actions.items()}
    assert seen(counters) == before
    SavedCounters(counters[2], f"{path}/two", "b").state_dict()
    return messages


def beside_a_tracker(rank: int, world_size: int, path: str) -> list[Any]:
    """Save a tracker with counters and :class:`RankCounters` in one checkpoint, and load both without their keys."""
    model, tracker, tracked = counting_model()
    counters = built()
    count(counters, values_of(rank))
    count_metrics(tracked, values_of(rank + 1))
    before = [seen(counters), held(tracked)]
    dcp.save({"counters": counters[2], "model": model, "tracker": tracker}, checkpoint_id=path)
    count(counters, [9.0])
    count_metrics(tracked, [9.0])
    state = {"counters": SavedCounters(counters[2], path), "model": model, "tracker": SavedTracker(tracker, path)}
    dcp.load(state, checkpoint_id=path)
    return [before, [seen(counters), held(tracked)]]
