"""States of the predictors of a stream according to their heartbeats, and differences between clocks."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import to_builtins

from delta_tracker.cli.entries import Entry
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import GONE_SECONDS, STATES, Heartbeat, State, predictor_state, see_heartbeats
from delta_tracker.stream.pin import Pin
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.store_clock import StoreClock, skew_problem


@dataclass(frozen=True, slots=True)
class SeenPredictor:
    """State of a predictor, computed from its last heartbeat and the newest entry of the log.

    Args:
        beat: last heartbeat of the predictor.
        health: state of the predictor as returned by :func:`~delta_tracker.stream.heartbeat.predictor_state`.
        seconds_ago: age of the last heartbeat in seconds, according to the store's clock.
        skew: time of the predictor's clock minus time of the store's clock, in seconds.
        lag_versions: number of versions that were committed after the version in the heartbeat. None if the predictor
            has not applied a version of this stream.
    """

    beat: Heartbeat
    health: State
    seconds_ago: float
    skew: float
    lag_versions: int | None

    @property
    def is_silent(self) -> bool:
        """True if the predictor has not written a heartbeat recently: :attr:`health` is ``"silent"``."""
        return self.health == "silent"

    @property
    def behind(self) -> int | None:
        """Number of versions not yet applied; None if unknown.

        For a live predictor, this is the number in its heartbeat, if there is one. Otherwise, it is
        :attr:`lag_versions`, which also counts versions that were committed after the heartbeat.
        """
        if self.lag_versions is None or self.is_silent or self.beat.lag_versions is None:
            return self.lag_versions
        return self.beat.lag_versions

    def to_dict(self) -> dict[str, object]:
        """Return the heartbeat and the state as a JSON object. Times are in seconds."""
        fields: dict[str, object] = to_builtins(self.beat)
        return fields | {
            "state": "silent" if self.is_silent else "live",
            "health": self.health,
            "seconds_ago": self.seconds_ago,
            "skew_seconds": self.skew,
            "lag_versions": self.lag_versions,
            "behind": self.behind,
        }


def read_predictors(
    storage: Storage, head: Manifest, clock: StoreClock, *, order: Pin | None, limit: int | None = None
) -> tuple[list[SeenPredictor], int]:
    """Return the predictors that wrote a heartbeat in the last hour, and the number of heartbeats that were not read.

    Predictors with errors come first; predictors without errors are sorted by state, worst first. Only the ``limit``
    newest heartbeats are read; None for no limit. The modification times of heartbeats update ``clock``. ``order`` is
    the newest pin or release of the stream.
    """
    seen, num_unread = see_heartbeats(storage, clock, max_age=GONE_SECONDS, limit=limit)
    found: list[SeenPredictor] = []
    for each in seen:
        beat, seconds_ago = each.beat, max(0.0, clock.now() - each.modified)
        lag = None if beat.version is None or beat.stream != head.stream else max(0, head.version - beat.version)
        health = predictor_state(beat, seconds_ago, head, order=order)
        found.append(SeenPredictor(beat, health, seconds_ago, each.skew, lag))
    found.sort(
        key=lambda each: (each.beat.error is None, STATES.index(each.health), each.beat.version or 0, each.beat.name)
    )
    return found, num_unread


def hosts_of(predictors: Sequence[SeenPredictor]) -> dict[str, dict[str, int | None]]:
    """Return the number of predictors, the number of silent predictors, and statistics of versions, by host.

    The statistics are the lowest, median and highest version, and the largest lag in versions. They exclude predictors
    that are silent, have stopped, or follow a different stream. A statistic is None if unknown.
    """
    found: dict[str, dict[str, int | None]] = {}
    for host in sorted({each.beat.host for each in predictors}):
        of_host = [each for each in predictors if each.beat.host == host]
        heard = [each.beat for each in of_host if each.health not in ("silent", "elsewhere", "stopped")]
        versions = [beat.version for beat in heard if beat.version is not None]
        lags = [beat.lag_versions for beat in heard if beat.lag_versions is not None]
        found[host] = {
            "predictors": len(of_host),
            "silent": sum(each.is_silent for each in of_host),
            "lowest": min(versions, default=None),
            "median": statistics.median_low(versions) if versions else None,
            "highest": max(versions, default=None),
            "worst_lag": max(lags, default=None),
        }
    return found


class Skews:
    """Differences between the clocks of a stream's publishers and the store's clock.

    A slow commit makes the publisher's clock appear to be behind. Therefore, the entry with the smallest absolute skew
    determines the skew of its publisher.
    """

    def __init__(self, entries: Iterable[Manifest | Entry] = ()) -> None:
        self._found: dict[int, float] = {}  # generation to skew in seconds
        for entry in entries:
            self.add(entry)

    def add(self, entry: Manifest | Entry) -> None:
        """Update the skew of the publisher that committed ``entry``. Each generation counts as one publisher."""
        skew = entry.skew
        self._found[entry.generation] = min(self._found.get(entry.generation, skew), skew, key=abs)

    def problems(self, predictors: Iterable[SeenPredictor] = (), clock: StoreClock | None = None) -> list[str]:
        """Return a description of each clock that differs from the store's clock by more than a minute.

        Checks the clocks of the publishers, of ``predictors``, and of this host if ``clock`` is given.
        """
        skews = {f"the publisher of generation {number}": skew for number, skew in sorted(self._found.items())}
        skews |= {f"predictor {each.beat.name}": each.skew for each in predictors}
        if clock is not None:
            skews["this host"] = -clock.offset
        described = (skew_problem(whose, seconds) for whose, seconds in skews.items())
        return [problem for problem in described if problem is not None]
