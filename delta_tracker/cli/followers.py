"""State of the predictors that follow a stream, read from their heartbeats."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from delta_tracker.stream.fleet import State as Health
from delta_tracker.stream.fleet import evaluate
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import GONE_SECONDS, Heartbeat, SeenHeartbeat, see_heartbeats
from delta_tracker.stream.pin import Pin
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.store_clock import StoreClock

# A predictor writes a heartbeat every five seconds while it applies versions or waits for them.
SILENT_SECONDS = 30.0

State = Literal["live", "silent"]


@dataclass(frozen=True, slots=True)
class FollowerView:
    """State of a predictor, computed from its last heartbeat and the newest entry of the log.

    Args:
        beat: last heartbeat.
        state: ``live``, or ``silent`` if the last heartbeat is more than 30 seconds old.
        seconds_ago: age of the heartbeat in seconds, by the store's clock.
        skew: predictor's clock minus the store's, in seconds.
        health: state by the window of the last heartbeats, see :func:`~delta_tracker.stream.fleet.evaluate`.
        lag_versions: number of versions in the log after the version in the heartbeat; None if the predictor has no
            version or follows another stream.
    """

    beat: Heartbeat
    state: State
    seconds_ago: float
    skew: float
    lag_versions: int | None
    health: Health

    @property
    def behind(self) -> int | None:
        """Number of versions not yet applied; None if unknown.

        For a live predictor, this is the number that the predictor wrote in its heartbeat, because :attr:`lag_versions`
        also counts versions that were committed after the heartbeat. Otherwise, or if the heartbeat has no number, this
        is :attr:`lag_versions`.
        """
        if self.lag_versions is None or self.state != "live" or self.beat.lag_versions is None:
            return self.lag_versions
        return self.beat.lag_versions

    def to_dict(self) -> dict[str, object]:
        """Return the state as JSON values. Times are in seconds."""
        return {
            "name": self.beat.name,
            "host": self.beat.host,
            "state": self.state,
            "health": self.health,
            "seconds_ago": self.seconds_ago,
            "skew_seconds": self.skew,
            "stream": self.beat.stream,
            "version": self.beat.version,
            "lag_versions": self.lag_versions,
            "lag_seconds": self.beat.lag_seconds,
            "resyncs": self.beat.resyncs,
            "error": self.beat.error,
        }


def read_followers(
    storage: Storage, head: Manifest, clock: StoreClock, *, order: Pin | None = None
) -> tuple[list[FollowerView], int]:
    """Return the predictors with a heartbeat in the last hour, sorted by name, and the number of older heartbeats.

    Args:
        storage: store of the stream.
        head: newest entry of the stream.
        clock: estimate of the store's time; it is updated with the modification times of the heartbeats.
        order: newest pin or release of the stream; None if there is none.

    Raises:
        StorageError: if the store cannot be read.
    """
    seen, num_unread = see_heartbeats(storage, clock, max_age=GONE_SECONDS)
    return [_follower(each, head, max(0.0, clock.now() - each.modified), order) for each in seen], num_unread


def hosts_of(states: Sequence[tuple[Heartbeat, Health]]) -> dict[str, dict[str, int | None]]:
    """Return the numbers of predictors and of silent ones of each host, and the versions and worst lag of the others.

    The range of versions and the worst lag in versions are None if they are unknown, as on a host whose predictors are
    all silent. Versions of another stream do not count.

    Args:
        states: last heartbeat and state of each predictor.
    """
    found: dict[str, dict[str, int | None]] = {}
    for host in sorted({beat.host for beat, _ in states}):
        of_host = [(beat, state) for beat, state in states if beat.host == host]
        heard = [beat for beat, state in of_host if state not in ("silent", "elsewhere")]
        versions = [beat.version for beat in heard if beat.version is not None]
        lags = [beat.lag_versions for beat in heard if beat.lag_versions is not None]
        found[host] = {
            "predictors": len(of_host),
            "silent": sum(state == "silent" for _, state in of_host),
            "lowest": min(versions, default=None),
            "median": statistics.median_low(versions) if versions else None,
            "highest": max(versions, default=None),
            "worst_lag": max(lags, default=None),
        }
    return found


def _follower(seen: SeenHeartbeat, head: Manifest, seconds_ago: float, order: Pin | None) -> FollowerView:
    beat = seen.beat
    is_here = beat.stream == head.stream and beat.version is not None
    lag = max(0, head.version - beat.version) if is_here and beat.version is not None else None
    state: State = "live" if seconds_ago <= SILENT_SECONDS else "silent"
    return FollowerView(beat, state, seconds_ago, seen.skew, lag, evaluate(beat, seconds_ago, head, order=order))
