"""Check that the publisher of a stream has stopped, for commands that replace the publisher."""

import secrets

from delta_tracker.errors import InvalidArgumentError, LivePublisherError
from delta_tracker.stream.heartbeat import heartbeat_path
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.takeover_request import PublisherActivity, PublisherObserver

SILENCE_SECONDS = 30.0
"""Default time in seconds without an entry or a heartbeat after which a publisher counts as dead."""


def check_silence(storage: Storage, silence: float) -> PublisherActivity | None:
    """Check that the publisher of a stream is silent. Return its last activity, or None if there is no stream.

    Raises:
        LivePublisherError: if the publisher wrote an entry or a heartbeat in the last ``silence`` seconds.
        InvalidArgumentError: if ``silence`` is less than the interval between the publisher's heartbeats.
    """
    name = f"command-{secrets.token_hex(4)}"  # two commands may run at the same time
    try:
        seen = PublisherObserver(storage, name).observe()
    finally:
        storage.delete(heartbeat_path(name))  # it is not a predictor
    if seen is None:
        return None
    if (period := seen.heartbeat_seconds) is not None and silence < period:
        remedy = f"Pass more than {period:g} s, the time between the publisher's heartbeats, or --force"
        raise InvalidArgumentError("--silence", silence, remedy)
    if seen.silent_seconds < silence:
        raise LivePublisherError(storage.url, seen.head.generation, seen.head.version, seen.silent_seconds)
    return seen
