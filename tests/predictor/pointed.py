"""Pointer objects of streams that tests write, as a publisher writes them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pointer import POINTER_NAME, HeadPointer, PointedSnapshot
from delta_tracker.stream.storage.storage import Storage


def point_at_the_head(storage: Storage, **fields: Any) -> HeadPointer:
    """Write the pointer object of a stream, with other ``fields`` if given."""
    log = StreamLog(storage)
    head, snapshot = log.head(), log.newest_snapshot()
    assert head is not None
    merged = [each for each in log.merged() if each.kind == "delta"]
    pointer = {
        "stream": head.stream,
        "generation": head.generation,
        "version": head.version,
        "xxh3": head.xxh3,
        "oldest": log.versions()[0],
        "snapshot": None
        if snapshot is None
        else PointedSnapshot(version=snapshot.version, merged=snapshot.merges is not None),
        "merged": tuple((each.first, each.last) for each in merged[-64:]),
        "time": 0.0,
    }
    found = HeadPointer(**(pointer | fields))
    storage.replace(POINTER_NAME, json.dumps(asdict(found)).encode())
    return found
