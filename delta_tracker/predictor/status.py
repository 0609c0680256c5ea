"""What a predictor tells: to a request, what its lookups read; to people, how it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Served(NamedTuple):
    """What the tables hold inside :meth:`Predictor.reading`."""

    version: int | None
    """The last version that was applied whole, None before the first."""
    applying: int | None
    """A version of which some rows are there already, None if none is on its way."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a predictor stands.

    Args:
        stream: id of the stream, None before the first version.
        version: the last version that was applied, claims included, None before the first.
        lag_versions: committed versions that are not applied; None if the store could not be asked.
        lag_seconds: how long ago the oldest of them was committed, by this host's clock, 0 if there is none; None as
            above.
        rows: rows written since the start.
        num_bytes: bytes of the parts that were applied since the start.
        resyncs: how often it went around a fault of the stream since the start.
        last_resync: what the last one went around, empty before.
        error: what ended or holds up :meth:`Predictor.follow`, or the gate; None while all is well.
        pinned: it stays at this version after a rollback; None if it follows.
    """

    stream: str | None
    version: int | None
    lag_versions: int | None
    lag_seconds: float | None
    rows: int
    num_bytes: int
    resyncs: int
    last_resync: str
    error: str | None
    pinned: int | None
