"""Requests to a standby to take over: the object ``control/takeover.json``.

It is a JSON object with the fields of :class:`TakeoverRequest`. It names the generation to fence, so that it is obeyed
once and need not be deleted.
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
from delta_tracker.stream.storage.storage import Storage

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
    """

    stream: Hex
    generation: Count
    time: Time


def request_takeover(storage: Storage, head: Manifest) -> None:
    """Request a takeover from the publisher of an entry, replacing an earlier request.

    Args:
        storage: store of the stream.
        head: newest entry.

    Raises:
        StorageError: if the store cannot be written.
    """
    request = TakeoverRequest(stream=head.stream, generation=head.generation, time=time.time())
    storage.replace(_NAME, json.dumps(asdict(request)).encode())


def is_requested(storage: Storage, head: Manifest) -> bool:
    """Return True if a takeover from the publisher of the newest entry was requested.

    A request for another generation is out of date, and ignored. A malformed one is logged and ignored.

    Args:
        storage: store of the stream.
        head: newest entry.

    Raises:
        StorageError: if the store cannot be read.
    """
    data = storage.read(_NAME, max_bytes=_MAX_BYTES)
    if data is None:
        return False
    try:
        request = convert(load_json(data.tobytes()), TakeoverRequest)
    except (ValueError, RecursionError) as error:
        _logger.warning("ignored malformed request: name=%s error=%s", _NAME, str(error)[:_MAX_TEXT])
        return False
    return (request.stream, request.generation) == (head.stream, head.generation)
