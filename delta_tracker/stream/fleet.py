"""State of a predictor by the window of its last heartbeats, instead of by one threshold."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, get_args

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import Heartbeat
from delta_tracker.stream.pin import Pin

State = Literal[
    "failing", "stuck", "silent", "elsewhere", "unpinned", "behind", "waiting", "pinned", "applying", "current"
]
STATES: tuple[State, ...] = get_args(State)
"""All states, the worst first."""
_PIN_SECONDS = 10.0  # predictors look for pins every 6.25 seconds or more often
_MIN_LOOKS = 3


def evaluate(beat: Heartbeat, seconds_since: float, head: Manifest, *, order: Pin | None = None) -> State:
    """Return the state of a predictor. ``guide/fleet.md`` defines the states.

    ``beat`` is its last heartbeat, ``seconds_since`` its age in seconds by the store's clock, ``head`` the newest entry
    of the stream, and ``order`` the newest pin or release, None without one. One of another stream is ignored.
    """
    span = max((age for age, _, _ in beat.window), default=0.0)
    if seconds_since > max(3 * beat.seconds, span):
        return "silent"
    if beat.stream is not None and beat.stream != head.stream:
        return "elsewhere"
    if order is not None and order.stream == head.stream:
        if order.kind == "pin" and beat.pin == order.counter:
            return "pinned"
        if order.kind == "pin" and _is_above(order, beat):
            return "unpinned"
        if order.kind == "release" and _waits_after(order, beat, head):
            return "waiting"
    return "applying" if len(beat.window) < _MIN_LOOKS else _progress(beat, head)


def _is_above(pin: Pin, beat: Heartbeat) -> bool:
    """Return True if a predictor has had a version above a pin for longer than it takes to find the pin."""
    return any(age >= _PIN_SECONDS and version is not None and version > pin.bad for age, version, _ in beat.window)


def _waits_after(release: Pin, beat: Heartbeat, head: Manifest) -> bool:
    """Return True if a canary waits for a release above its bound, because the versions before it may be bad."""
    if not _is_canary(beat) or beat.error is not None or beat.version is None or beat.pin >= release.counter:
        return False
    if beat.version >= release.version or len({version for _, version, _ in beat.window}) > 1:
        return False  # it moves: it is above the release, or does not follow pins
    if beat.canary_seconds is not None:
        return head.created < release.time + beat.canary_seconds  # the snapshot is older than its release
    return head.version < release.version + (beat.canary_versions or 0)


def _progress(beat: Heartbeat, head: Manifest) -> State:
    """Return the state by the versions and lags of a full window."""
    if beat.version == head.version:
        return "current"  # an error, such as that of one poll, delays nothing
    has_moved = len({version for _, version, _ in beat.window}) > 1
    lags = [lag for _, _, lag in beat.window]
    known = [lag for lag in lags if lag is not None]
    if beat.error is not None and not has_moved:
        return "failing"
    if 0 in lags or (has_moved and known and min(known) <= (beat.canary_versions or 0)):
        return "current"
    if _is_canary(beat) and not has_moved and known and known[-1] <= known[0]:
        return "current"  # no version came, so the canary had none to apply
    if len(known) == len(lags) and not has_moved:
        return "stuck"
    falls = len(known) < len(lags) or any(later < earlier for earlier, later in pairwise(known))
    return "applying" if falls else "behind"


def _is_canary(beat: Heartbeat) -> bool:
    return beat.canary_versions is not None or beat.canary_seconds is not None
