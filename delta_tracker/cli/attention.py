"""Notices about conditions of a stream that need attention. ``report`` and ``top`` show the notices."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from delta_tracker.cli.history import History
from delta_tracker.cli.predictors import SeenPredictor
from delta_tracker.cli.text import duration
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.heartbeat import State

Level = Literal["fault", "warning", "note"]

LEVELS: tuple[Level, ...] = ("fault", "warning", "note")
_MAX_NAMES = 3
_MAX_PROBLEM = 160  # characters
_MIN_QUIET_SECONDS = 60.0
_QUIET_GAPS = 3  # the publisher is quiet after so many times the longest time between versions
_MIN_GAPS = 3
_RIVAL_SECONDS = 600.0  # two claims within this time look like two jobs that fence each other


@dataclass(frozen=True, slots=True)
class Notice:
    """Condition of a stream that needs attention, and what to do about it.

    Args:
        level: ``fault`` for a failure, ``warning`` for a condition that may lead to a failure, ``note`` otherwise.
        what: description of the condition. Treat it as untrusted: it may contain names and errors from the stream.
        next_step: instruction for the operator. Treat it as untrusted, too.
    """

    level: Level
    what: str
    next_step: str


def sort_notices(notices: Iterable[Notice]) -> list[Notice]:
    """Sort notices by level: faults first, then warnings, then notes. The sort is stable."""
    return sorted(notices, key=lambda each: LEVELS.index(each.level))


def predictor_notices(predictors: Sequence[SeenPredictor]) -> list[Notice]:
    """Return notices about predictors, one for all predictors with the same state or the same kind of error."""
    faulty = [each for each in predictors if each.beat.error is not None]
    found = _errors([each for each in faulty if each.health == "failing"], "fault")
    others = [each for each in faulty if each.health not in ("failing", "silent", "elsewhere", "stopped")]
    found += _errors(others, "warning")
    by_state = {state: [each for each in predictors if each.health == state] for state in _STATES}
    for state, (level, what, next_step) in _STATES.items():
        if by_state[state]:
            longest = max(each.seconds_ago for each in by_state[state])
            found.append(Notice(level, f"{_names(by_state[state])}: {what.format(duration(longest))}", next_step))
    if differing := [each for each in predictors if each.beat.differences and each.health != "stopped"]:
        step = "Deploy the trainer's model to them. A predictor of a changed model begins with a snapshot"
        found.append(Notice("warning", f"{_names(differing)}: {differing[0].beat.differences[:_MAX_PROBLEM]}", step))
    return found


_STATES: dict[State, tuple[Level, str, str]] = {
    "stuck": (
        "fault",
        "stuck, the version does not move although newer ones exist",
        "Read the log of that process: a lookup or a row store may not return. Restart it if it stays so",
    ),
    "silent": (
        "warning",
        "silent, no data for up to {}",
        "Check that the process runs and can write to the store. One that was killed leaves this list after an hour",
    ),
    "elsewhere": (
        "warning",
        "has a version of another stream",
        "Pass the URL of this stream to it; if this stream replaced its own, publish a snapshot",
    ),
    "unpinned": (
        "warning",
        "unpinned, applies versions in spite of a rollback",
        "Build it with rollout=Rollout(follows_pins=True), or call predictor.rollback(version) in its process",
    ),
    "behind": (
        "warning",
        "behind, and the lag never falls",
        "Publish less often or fewer rows (Cadence, TopK), or give the predictor more bandwidth or CPU",
    ),
    "waiting": (
        "note",
        "waiting, a canary that may not apply the snapshot of the release yet",
        "None: it continues when the newest version is far enough ahead",
    ),
}


def level_of(state: State) -> Level:
    """Return the level of a notice about predictors in ``state``."""
    if state == "failing":
        return "fault"
    return _STATES[state][0] if state in _STATES else "note"


def publisher_notices(history: History, head: Manifest, now: float, described: Collection[int]) -> list[Notice]:
    """Return notices about the publishers and versions of a stream.

    ``now`` is the Unix time in seconds, according to the store's clock. Missing versions in ``described`` are skipped,
    because other notices describe them.
    """
    if not history.bins:
        step = "Call Publisher.snapshot() on the trainer. Without it, predictors have nothing to start from"
        return [Notice("warning", "No version has been committed yet", step)]
    found = silence_notices(now - head.committed, history.gaps.count, max(each.max_gap for each in history.bins))
    if head.snapshot is None:
        step = "Call Publisher.snapshot() on the trainer"
        found.append(Notice("warning", "The stream has no snapshot, so that no new predictor can start", step))
    if claims := history.claims:
        times = f" {len(claims)} times, last" if len(claims) > 1 else ""
        what = f"A new publisher took over{times} with version {claims[-1][0]}"
        pauses = [after - before for (_, before), (_, after) in pairwise(claims)]
        if (seconds := min(pauses, default=_RIVAL_SECONDS)) < _RIVAL_SECONDS:
            what += f"; two of these within {duration(seconds)}"
            step = "Two jobs may publish to this stream and fence each other: stop one of them"
            found.append(Notice("warning", what, step))
        else:
            step = "If the former job was to go on, it was fenced and its log has FencedError: stop one of the two jobs"
            found.append(Notice("note", what, step))
    lost = [version for version in history.lost if version not in described]
    if lost:
        left = history.num_missing - len(described) - _MAX_NAMES
        versions = ", ".join(map(str, lost[:_MAX_NAMES])) + (f" and {left} more" if left > 0 else "")
        what = f"Version{'' if len(lost) == 1 else 's'} {versions}: no entry in the log, although later ones exist"
        step = "Nothing, if a person deleted them: predictors below them continue from the next snapshot"
        found.append(Notice("warning", what, step))
    return found


def silence_notices(age: float, num_gaps: int, longest: float) -> list[Notice]:
    """Return a list that contains one notice if the publisher seems to have stopped, or an empty list otherwise.

    ``age`` is the age of the newest version. ``num_gaps`` is the number of observed intervals between successive
    versions, and ``longest`` is the longest of these intervals. Times are in seconds.
    """
    if num_gaps < _MIN_GAPS or age <= max(_MIN_QUIET_SECONDS, _QUIET_GAPS * longest):
        return []
    what = f"No version for {duration(age)}; before, the longest time between two was {duration(longest)}"
    return [Notice("warning", what, "If training should go on, read the log of the trainer and Publisher.error")]


def clock_notices(skews: Iterable[str]) -> list[Notice]:
    """Return a notice for each of ``skews``, which are descriptions of clocks that differ from the store's clock."""
    step = (
        "Synchronize the clock of that host (NTP). Ages here are by the store's clock. Copy streams with their "
        "modification times (cp -a, rsync -t)"
    )
    return [Notice("warning", skew, step) for skew in skews]


def _errors(predictors: Sequence[SeenPredictor], level: Level) -> list[Notice]:
    """Return one notice for each kind of error that ``predictors`` report."""
    kinds: dict[str, list[SeenPredictor]] = {}
    for each in predictors:
        kinds.setdefault((each.beat.error or "").partition(":")[0], []).append(each)
    found = []
    state = "failing" if level == "fault" else "has an error"
    for of_kind in kinds.values():
        step, error = of_kind[0].beat.next_step, of_kind[0].beat.error or ""
        problem = error.removesuffix(f". {step}.")
        cut = "…" if len(problem) > _MAX_PROBLEM else ""
        what = f"{_names(of_kind)}: {state}, {problem[:_MAX_PROBLEM]}{cut}"
        found.append(Notice(level, what, step or "Correct the cause that its error names; it tries again by itself"))
    return found


def _names(predictors: Sequence[SeenPredictor]) -> str:
    names = ", ".join(each.beat.name for each in predictors[:_MAX_NAMES])
    left = len(predictors) - _MAX_NAMES
    return f"Predictor {names}" if len(predictors) == 1 else f"Predictors {names}" + (f" and {left} more" * (left > 0))
