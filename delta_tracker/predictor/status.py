"""State that a predictor reports: for one request, and for monitoring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Served(NamedTuple):
    """Versions that the tables hold inside :meth:`Predictor.reading`."""

    version: int | None
    """Last version that was applied completely; None before the first."""
    applying: int | None
    """Version of which some rows are already written; None if there is none."""


@dataclass(frozen=True, slots=True)
class Status:
    """State of a predictor.

    Args:
        stream: id of the stream, None before the first version.
        version: last applied version, claims included; None before the first.
        lag_versions: number of committed versions that are not applied; None if the store cannot be read.
        lag_seconds: age of the oldest of them in seconds, by this host's clock; 0 if there is none, None if the store
            cannot be read.
        rows: number of rows written since the start.
        num_bytes: size in bytes of the parts applied since the start.
        resyncs: number of resyncs since the start.
        last_resync: description of the last resync; empty before the first.
        error: error that ended or delays :meth:`Predictor.follow`, or of the held version; None otherwise.
        pinned: version of a rollback; None if newer versions are applied.
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
