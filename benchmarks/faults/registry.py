"""Registry of the 18 faults and of the cases that reproduce them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

RIGHT = "right"

FAULTS: dict[int, str] = {
    1: "EMBEDDING mode keeps the autograd graph of every batch alive",
    2: "a read between forward and backward, or a forgotten `step()`, loses rows",
    3: "a read with nothing new raises",
    4: "a feature of two tables is recorded for one of them only; one table name in two modules breaks the forward",
    5: "ids lack the shard's offset; half of two column shards is lost",
    6: "EMBEDDING mode kills a rank that has no ids of a table",
    7: "evaluation counts as an update",
    8: "DATA_PARALLEL: other ranks' updates of the replica are missing",
    9: "EMBEDDING mode refuses EmbeddingBagCollection",
    10: "momentum modes read wrong rows of a fused group; SGD is accepted, then fails",
    11: "`clear(consumer)` does nothing; a read without a name fails without listing the names",
    12: "a slow consumer's log is never merged; memory is unbounded",
    13: "top-k is accepted and ignored",
    14: "skipping one table of two breaks the forward",
    15: "managed-collision modules are listed and record nothing",
    16: "rows that Adam moves without a lookup are missing (DENSE, DATA_PARALLEL)",
    17: "a DENSE read before `optimizer.step()` loses rows; `load_state_dict` is not recorded",
    18: "a model without dense parameters cannot be tracked",
}


class WrongError(AssertionError):
    """A tracker is wrong; the message is a short description of the error."""


@dataclass(frozen=True, slots=True)
class Case:
    """One check of a fault.

    Args:
        fault: number of the fault.
        run: takes a :data:`~benchmarks.faults.trackers.Make`; raises if the tracker is wrong.
        num_ranks: number of ranks.
    """

    fault: int
    run: Callable[..., None]
    num_ranks: int


CASES: dict[str, Case] = {}

_Run = TypeVar("_Run", bound=Callable[..., None])


def case(fault: int, *, num_ranks: int = 1) -> Callable[[_Run], _Run]:
    """Return a decorator that registers a function as a case of a fault."""

    def register(run: _Run) -> _Run:
        CASES[run.__name__] = Case(fault, run, num_ranks)
        return run

    return register


def expect(condition: object, otherwise: str) -> None:
    """Raise :class:`WrongError` with the text ``otherwise`` unless ``condition`` holds."""
    if not condition:
        raise WrongError(otherwise)
