"""State of a predictor by the window of its last heartbeats, instead of by one threshold."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import Heartbeat

State = Literal["current", "applying", "behind", "stuck", "silent", "pinned", "failing", "elsewhere"]
_MIN_LOOKS = 3


def evaluate(beat: Heartbeat, seconds_since: float, head: Manifest, *, pin: int = 0) -> State:
    """Return the state of a predictor.

    ``silent``: three heartbeats, or as many seconds as the window has, are missing. ``elsewhere``: its version belongs
    to another stream. ``pinned``: it has followed the pin that applies. ``failing``: it has an error, is behind the
    newest version, and its version did not move in the window. ``current``: a heartbeat had no lag, or the version is
    the newest. ``stuck``: it lags, and its version did not move. ``behind``: its version moves, but the lag never
    falls. ``applying``: otherwise, and with fewer than three heartbeats.

    Args:
        beat: last heartbeat.
        seconds_since: age of the heartbeat in seconds, by the store's clock.
        head: newest entry of the stream.
        pin: counter of the pin that applies, 0 if none.

    Example:
        >>> from delta_tracker.stream.log import StreamLog
        >>> from delta_tracker.stream.storage.storage import Storage
        >>> head = StreamLog(Storage("memory://")).claim().head
        >>> window = ((20.0, None, 1), (10.0, 0, 0), (0.0, 0, 0))  # age in seconds, version, lag in versions
        >>> fields = {"version": 0, "lag_versions": 0, "lag_seconds": 0.0, "resyncs": 0, "error": None}
        >>> evaluate(Heartbeat(name="a", time=0.0, stream=head.stream, window=window, **fields), 1.0, head)
        'current'
    """
    span = max((age for age, _, _ in beat.window), default=0.0)
    if seconds_since > max(3 * beat.seconds, span):
        return "silent"
    if beat.stream is not None and beat.stream != head.stream:
        return "elsewhere"
    if pin and beat.pin == pin:
        return "pinned"
    return "applying" if len(beat.window) < _MIN_LOOKS else _progress(beat, head)


def _progress(beat: Heartbeat, head: Manifest) -> State:
    """Return the state by the versions and lags of a full window."""
    if beat.version == head.version:
        return "current"  # an error, such as that of one poll, delays nothing
    has_moved = len({version for _, version, _ in beat.window}) > 1
    lags = [lag for _, _, lag in beat.window]
    known = [lag for lag in lags if lag is not None]
    if beat.error is not None and not has_moved:
        return "failing"
    if 0 in lags:
        return "current"
    if beat.canary is not None and not has_moved and known and known[-1] <= known[0]:
        return "current"  # no version came, so the canary had none to apply
    if len(known) == len(lags) and not has_moved:
        return "stuck"
    falls = len(known) < len(lags) or any(later < earlier for earlier, later in pairwise(known))
    return "applying" if falls else "behind"
