"""Cases for states that an outside loader fills: completely, in part, not at all, or from another checkpoint.

The loader is DCP with a planner that skips tensors, or a function of this file that fills the tensors of a state.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from delta_tracker import ModelDeltaTracker, RankCounters
from delta_tracker.integrations.dcp import SavedCounters, SavedTracker
from tests.models import Spec, Table, shard
from tests.publisher.publishing_cases import attempt
from tests.tracker.checkpointing_cases import exchange, log_state, same, train
from tests.tracker.rank_states_cases import KINDS, count, held, values_of

_SPEC = Spec([Table("t0", 17, "row"), Table("t1", 10, "table:0")])
_FINE = "nothing was raised"


class Trainer:
    """A model, its tracker with counters, and counters of their own.

    Trainers with another ``shift`` count other values of the same number and integral part.
    """

    def __init__(self, rank: int, shift: float = 0.0) -> None:
        self.model = shard(_SPEC)
        self.tracker = ModelDeltaTracker(self.model, ["a", "b"], mode="embedding")
        self.tracked = {name: kind() for name, kind in KINDS.items()}
        for name, counter in self.tracked.items():
            self.tracker.register_counter(name, counter)
        self.counted = {name: kind() for name, kind in KINDS.items()}
        self.counters = RankCounters(self.counted)
        self._generator = torch.Generator().manual_seed(rank)
        self._rank = rank
        self._shift = shift

    def train(self) -> None:
        train(_SPEC, self.model, self._generator, 1)
        self.tracker.step()
        self._count()

    def change(self) -> None:
        """Change all states, without a collective."""
        for fqn in self.tracker.tables:
            self.tracker.mark_changed(fqn)
        self._count()

    def _count(self) -> None:
        for number, counters in enumerate((self.tracked, self.counted)):
            count(counters, [value + self._shift for value in values_of(self._rank + number)])

    def saved(self, kind: str) -> Any:
        """Return the object that can be saved under a key."""
        return {"tracker": self.tracker, "counters": self.counters}[kind]

    def loader(self, kind: str, path: str) -> Any:
        """Return the object that loads what was saved under a key."""
        return SavedTracker(self.tracker, path) if kind == "tracker" else SavedCounters(self.counters, path)

    def seen(self, kind: str) -> list[Any]:
        return [log_state(self.tracker), held(self.tracked)] if kind == "tracker" else [None, held(self.counted)]


def _equal(left: list[Any], right: list[Any]) -> bool:
    """Return whether two results of :meth:`Trainer.seen` are equal."""
    is_same = left[0] is None or (same(left[0], right[0]) and same(right[0], left[0]))
    return is_same and left[1] == right[1]


class _Skipping(DefaultLoadPlanner):
    """Planner that fills all tensors with a pattern, and does not read those whose keys have an ending."""

    def __init__(self, ending: str) -> None:
        super().__init__(allow_partial_load=True)
        self._ending = ending

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(*args, **kwargs)
        for tensor in self.state_dict.values():
            tensor.untyped_storage().fill_(0x7F)

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        plan.items = [item for item in plan.items if not item.dest_index.fqn.endswith(self._ending)]
        return plan


def planners(rank: int, world_size: int, path: str, kind: str) -> dict[str, str]:
    """Load with planners that skip tensors, and return the errors. A state is then the saved one, or unchanged."""
    other, trainer = Trainer(rank, 0.25), Trainer(rank)
    for number, each in enumerate((trainer, other), start=1):
        each.train()
        dcp.save({kind: each.saved(kind), "weight": torch.ones(3)}, checkpoint_id=f"{path}/{number}")
    saved = trainer.seen(kind)
    names: list[Any] = [None] * world_size
    dist.all_gather_object(names, list(trainer.loader(kind, f"{path}/1").state_dict()))
    messages = {}

    def load(what: str, key: str, planner: DefaultLoadPlanner, source: str = "1") -> None:
        trainer.change()
        before = trainer.seen(kind)
        state = {key: trainer.loader(kind, f"{path}/1"), "weight": torch.zeros(3)}
        messages[what] = attempt(lambda: dcp.load(state, checkpoint_id=f"{path}/{source}", planner=planner))
        assert _equal(trainer.seen(kind), saved if messages[what] == _FINE else before), what

    load("another key", "other", DefaultLoadPlanner(allow_partial_load=True))
    load("another checkpoint", kind, DefaultLoadPlanner(allow_partial_load=True), "2")
    for name in sorted({name for each in names for name in each}):
        load(name, kind, _Skipping(name))
        assert (messages[name] == _FINE) == (name not in names[rank]), (name, messages[name])
    load("the same key", kind, DefaultLoadPlanner(allow_partial_load=True))
    return {key: messages[key] for key in ("another key", "another checkpoint", "the same key")} | {
        "a tensor": messages[f"rank{rank}of{world_size}/counters/product/seen"]
    }


def _fill(tensors: Iterable[tuple[Tensor, Tensor, float]], pattern: int) -> None:
    """Fill the bytes of the first tensors with a pattern, then a fraction of them with those of the second tensors."""
    for target, source, fraction in tensors:
        target.untyped_storage().fill_(pattern)
        num_bytes = int(target.nbytes * fraction)
        _bytes(target)[:num_bytes] = _bytes(source)[:num_bytes]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def patterns(rank: int, world_size: int, path: str, kind: str) -> dict[str, int]:
    """Load tensors of which one has a pattern in all or half of its bytes, and the others the saved values.

    Returns the number of loads that were exact, and of those that were refused. If the values are those that were
    saved, the load must be exact.
    """
    trainer = Trainer(rank)
    trainer.train()
    saved, state = trainer.seen(kind), trainer.saved(kind).state_dict()
    dcp.save({kind: state}, checkpoint_id=path)
    whole, counts = exchange(state), {"exact": 0, "refused": 0}
    fills = [(0x00, 0), (0x00, 0.5), (0x7F, 0), (0x7F, 0.5), (0x7F, 1)]
    for name, (pattern, fraction) in product(trainer.loader(kind, path).state_dict(), fills):
        loader = trainer.loader(kind, path)
        wanted = loader.state_dict()
        _fill(((wanted[each], whole[each], fraction if each == name else 1) for each in wanted), pattern)
        is_saved = all(torch.equal(_bytes(wanted[each]), _bytes(whole[each])) for each in wanted)
        trainer.change()
        before = trainer.seen(kind)
        message = attempt(lambda loader=loader, wanted=wanted: loader.load_state_dict(wanted))
        is_exact = message == _FINE
        assert is_exact or not is_saved, (name, pattern, fraction, message)
        assert is_exact or name in message, (name, message)
        assert _equal(trainer.seen(kind), saved if is_exact else before), (name, pattern, fraction)
        counts["exact" if is_exact else "refused"] += 1
    return counts
