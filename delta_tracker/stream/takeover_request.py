"""Requests to a standby to take over: the object ``control/takeover.json``.

It is a JSON object with the fields of :class:`TakeoverRequest`. It names the generation to fence, so that only one
standby takes over, and the object need not be deleted.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

from msgspec import convert

from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.parse import load_json
from delta_tracker.stream.heartbeat import read_record
from delta_tracker.stream.storage.storage import Storage, Transfer

_NAME = "control/takeover.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverRequest:
    """Request to take over from the publisher of a generation."""

    stream: Hex  # id of the stream
    generation: Count  # generation of the publisher
    time: Time  # Unix time of the host that made the request, in seconds
    # True to fence the publisher even if it is alive. Otherwise, the request lapses when the publisher leaves an entry
    # or a heartbeat.
    force: bool = False


def request_takeover(storage: Storage, head: Manifest, *, force: bool = False) -> None:
    """Request a takeover from the publisher of the newest entry; see :class:`TakeoverRequest` for ``force``."""
    request = TakeoverRequest(stream=head.stream, generation=head.generation, time=time.time(), force=force)
    storage.replace(_NAME, json.dumps(asdict(request)).encode())


def cancel_takeover(storage: Storage) -> bool:
    """Delete the request. Return False if there was none. A standby that has read it may still take over."""
    is_there = storage.size(_NAME) is not None
    storage.delete(_NAME)
    return is_there


def read_request(storage: Storage, head: Manifest, last_sign: float) -> TakeoverRequest | None:
    """Return the request for a takeover from the publisher of the newest entry; None if there is none.

    Ignores a malformed request, one for another generation, and one without ``force`` that is not newer than
    ``last_sign``, the publisher's last sign of life in Unix seconds by the store's clock.
    """
    response = Transfer()
    request = read_record(
        storage, _NAME, "request", lambda data: convert(load_json(data), TakeoverRequest), response=response
    )
    if request is None or (request.stream, request.generation) != (head.stream, head.generation):
        return None
    has_lapsed = response.modified is None or response.modified <= last_sign
    return request if request.force or not has_lapsed else None
