"""Requests to a standby to take over: the object ``control/takeover.json``.

It is a JSON object with the fields of :class:`TakeoverRequest`. It names the generation to fence, so that only one
standby takes over, and the object need not be deleted.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass

from msgspec import convert

from delta_tracker.stream.format.field_types import Count, Hex, Time
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.parse import load_json
from delta_tracker.stream.storage.storage import Storage, Transfer

_logger = logging.getLogger(__name__)

_NAME = "control/takeover.json"
_MAX_BYTES = 16 << 10
_MAX_TEXT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeoverRequest:
    """Request to take over from a publisher.

    Args:
        stream: id of the stream.
        generation: generation of the publisher.
        time: Unix time of the host that made the request, in seconds.
        force: True to fence the publisher even if it is alive. Otherwise, the request lapses when the publisher leaves
            an entry or a heartbeat.
    """

    stream: Hex
    generation: Count
    time: Time
    force: bool = False


def request_takeover(storage: Storage, head: Manifest, *, force: bool = False) -> None:
    """Request a takeover from the publisher of an entry, replacing an earlier request.

    Args:
        storage: store of the stream.
        head: newest entry.
        force: True to fence the publisher even if it is alive.

    Raises:
        StorageError: if the store cannot be written.
    """
    request = TakeoverRequest(stream=head.stream, generation=head.generation, time=time.time(), force=force)
    storage.replace(_NAME, json.dumps(asdict(request)).encode())


def cancel_takeover(storage: Storage) -> bool:
    """Delete the request. Return False if there was none.

    A standby that has read the request may still take over.

    Raises:
        StorageError: if the store cannot be written.
    """
    is_there = storage.size(_NAME) is not None
    storage.delete(_NAME)
    return is_there


def read_request(storage: Storage, head: Manifest, last_sign: float) -> TakeoverRequest | None:
    """Return the request for a takeover from the publisher of the newest entry; None if there is none.

    A request for another generation is out of date, and ignored. A request without ``force`` has lapsed, and is
    ignored, if it is not newer than the publisher's last sign of life. A malformed one is logged and ignored.

    Args:
        storage: store of the stream.
        head: newest entry.
        last_sign: time of the publisher's last sign of life, in Unix seconds by the store's clock.

    Raises:
        StorageError: if the store cannot be read.
    """
    response = Transfer()
    data = storage.read(_NAME, max_bytes=_MAX_BYTES, transfer=response)
    if data is None:
        return None
    try:
        request = convert(load_json(data.tobytes()), TakeoverRequest)
    except (ValueError, RecursionError) as error:
        _logger.warning("ignored malformed request: name=%s error=%s", _NAME, str(error)[:_MAX_TEXT])
        return None
    if (request.stream, request.generation) != (head.stream, head.generation):
        return None
    has_lapsed = response.modified is None or response.modified <= last_sign
    return request if request.force or not has_lapsed else None
