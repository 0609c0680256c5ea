"""State of a predictor: the versions that a lookup reads, and the status for monitoring."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Served(NamedTuple):
    """Versions that the tables contain, as yielded by :meth:`Predictor.reading`."""

    version: int | None
    """Last completely applied version; None before the first version, and while a changed model needs a snapshot."""
    applying: int | None
    """Version that is partly written; None if there is no such version.

    If the writes of several versions were interrupted, this is the version of the last write. The tables may then also
    contain rows of the other versions.
    """


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of rows, bytes, raw ids and requests of a predictor since its start.

    Args:
        rows: number of rows written.
        num_bytes: size in bytes of the parts applied.
        admitted: number of raw ids mapped to rows, including raw ids that move to another row. A raw id of a table with
            several mappings is counted once for each mapping.
        evicted: number of raw ids removed from their rows, counted in the same way.
        requests: number of requests by operation, including requests of other users of the same ``Storage`` objects.
        cache: number of parts read from the host cache (``hits``), fetched into the cache (``misses``) or read without
            the cache (``bypasses``), including reads by other users of the same ``HostCache``; empty without a cache.
    """

    rows: int
    num_bytes: int
    admitted: int
    evicted: int
    requests: Mapping[str, int]
    cache: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Status:
    """State of a predictor.

    Args:
        stream: id of the stream; None before the first version.
        version: last applied version, possibly a claim; None before the first version.
        lag_versions: number of committed versions that are not applied; None if the store cannot be read.
        lag_seconds: age in seconds of the oldest version that is not applied; 0 if all are applied; None if unknown.
        resyncs: number of resyncs since the start of the predictor.
        last_resync: description of the last resync; empty if there was none.
        error: type and message of :attr:`Predictor.error`; None if there is no error.
        pinned: version of the pin or rollback that the predictor follows; None if there is none.
        poll_seconds: current interval between two polls of :meth:`Predictor.follow`; None if its thread is not running.
        notice: message about a non-error condition, such as a pin that is not followed; empty if there is none.
        why: why a version was applied or not, such as ``version 7 is the newest``; empty before the first decision; see
            ``guide/fleet.md``.
        left_out: names of the tables and dense tensors of the stream that are not applied, because the argument
            ``tables`` of the predictor leaves them out, or because they do not fit the model. Empty before the
            first :meth:`Predictor.sync`, and in a row store until a version is applied.
        differences: messages about tables and dense tensors that are not applied or only partly applied, and about
            applied tables that are no longer in the stream; empty before the first version with rows.
        counts: numbers of rows, bytes, raw ids and requests.
    """

    stream: str | None
    version: int | None
    lag_versions: int | None
    lag_seconds: float | None
    resyncs: int
    last_resync: str
    error: str | None
    pinned: int | None
    poll_seconds: float | None
    notice: str
    why: str
    left_out: tuple[str, ...]
    differences: tuple[str, ...]
    counts: Counts


def type_and_message(error: Exception | None) -> str | None:
    """Return the type and message of ``error``; None if ``error`` is None."""
    return None if error is None else f"{type(error).__name__}: {error}"
