"""Streams that a log continues: :func:`former_streams`."""

from __future__ import annotations

from bisect import bisect_left

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import readable

_MAX_UNREADABLE = 2  # consecutive malformed entries that are skipped


def former_streams(log: StreamLog, head: Manifest) -> tuple[str, ...]:
    """Return the streams of which the stream of the newest entry is a fork, the last one first.

    Each promotion of a mirror starts another stream in its log, with a claim that names the former one. Retention keeps
    claims, so the claim is the lowest entry of its stream. The search reads a logarithmic number of entries.

    Args:
        log: the log.
        head: its newest entry.

    Raises:
        StorageError: if the store cannot be read.
    """
    versions, found, stream = log.versions(), list[str](), head.stream
    while versions:

        def is_of_stream(version: int, name: str = stream) -> bool:
            entry = None
            for above in range(version, version + _MAX_UNREADABLE + 1):
                entry = entry or readable(log.read, above)
            return entry is not None and entry.stream == name

        first = bisect_left(versions, True, key=is_of_stream)
        claim = None if first == len(versions) else readable(log.read, versions[first])
        if claim is None or claim.forked_from is None or claim.forked_from.stream in found:
            break
        stream = claim.forked_from.stream
        found.append(stream)
        versions = versions[:first]
    return tuple(found)
