"""Random programs of :mod:`tests.integrations.lightning_orders`, without an import of Lightning."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

_LETTERS = "TCSWA"

# Keys of ``lightning_orders.AVERAGES``.
AVERAGES = ("none", "mean", "exponential", "stochastic", "pruning")

# Where a search runs; None: nowhere. "tuner" is before the first fit, "start" in on_fit_start, a digit is an epoch.
SEARCHES = (None, "lr tuner", "lr start", "lr 0", "lr 1", "size tuner", "size start", "size 0", "size 1")
FAILURES = (None, "setup", "fit start", "batch")
SECONDS = (None, "again", "saver", "newest", "after")


@dataclass(frozen=True)
class Program:
    """A first fit, and what comes after it.

    Args:
        order: callbacks by letter: the tracker's, the counters', a saver, one that watches, and one that averages.
        averages: key of ``AVERAGES``.
        search: one of ``SEARCHES``.
        failure: where the first fit raises, one of ``FAILURES``. The second one continues from OnExceptionCheckpoint's.
        second: the second fit, one of ``SECONDS``: none, with the same trainer, or with a new one from a checkpoint of
            the saver, of ModelCheckpoint, or one that is saved after the first fit.
        every_rank: True if each rank saves its own checkpoint.
    """

    order: str
    averages: str
    search: str | None
    failure: str | None
    second: str | None
    every_rank: bool


def programs(world_size: int, count: int) -> list[dict[str, Any]]:
    """Return random programs, in which each value of each argument occurs."""
    choices = random.Random(world_size)
    orders = ["".join(each) for each in itertools.permutations(_LETTERS)]
    searches = [each for each in SEARCHES if world_size == 1 or "size" not in (each or "")]  # as Lightning requires

    def drawn(values: Any) -> Iterator[Any]:
        while True:
            yield from choices.sample(values, len(values))

    columns = [
        drawn(each) for each in (orders, AVERAGES, searches, (None, None, None, *FAILURES), SECONDS, (False, True))
    ]
    return [asdict(Program(*(next(each) for each in columns))) for _ in range(count)]
