"""Streams that a log continues: :func:`former_streams`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import readable

_MAX_UNREADABLE = 2  # consecutive malformed entries that are skipped


def former_streams(log: StreamLog, head: Manifest) -> tuple[str, ...]:
    """Return the streams of which the stream of the newest entry is a fork, the last one first."""
    claims = forks(log.versions(), head.stream, partial(readable, log.read))
    return tuple(each.forked_from.stream for each in claims if each.forked_from is not None)


def forks(versions: list[int], stream: str, read: Callable[[int], Manifest | None]) -> Iterator[Manifest]:
    """Yield the claims that forked a stream and its former ones from others, the newest first.

    Each promotion of a mirror starts another stream in its log, with a claim that names the former one. Retention keeps
    claims, so the claim is the lowest entry of its stream. The search reads a logarithmic number of entries. The
    ``versions`` of the log end with one of the stream, ascending.
    """
    found = {stream}
    while versions:

        def is_of_stream(version: int, name: str = stream) -> bool:
            entries = map(read, range(version, version + _MAX_UNREADABLE + 1))
            return next((entry.stream == name for entry in entries if entry is not None), False)

        first = bisect_left(versions, True, key=is_of_stream)
        claim = None if first == len(versions) else read(versions[first])
        if claim is None or claim.forked_from is None or claim.forked_from.stream in found:
            return
        yield claim
        stream = claim.forked_from.stream
        found.add(stream)
        versions = versions[:first]
