"""Minimisation of a schedule: operations are removed while the run breaks the same rule."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.values import Operation, Schedule


def shrink(schedule: Schedule, is_found: Callable[[Schedule], bool]) -> Schedule:
    """Return a schedule of which no operation can be removed.

    Args:
        schedule: a schedule for which ``is_found`` is True.
        is_found: returns True if a schedule still shows the finding.
    """
    size = max(1, len(schedule.operations) // 2)
    while True:
        shorter = _without(schedule, size, is_found)
        if len(shorter.operations) < len(schedule.operations) and size == 1:
            schedule = shorter
            continue  # until nothing can be removed
        if size == 1:
            return _plain(shorter, is_found)
        schedule, size = shorter, size // 2


def _without(schedule: Schedule, size: int, is_found: Callable[[Schedule], bool]) -> Schedule:
    """Remove runs of ``size`` operations, the last first."""
    begin = len(schedule.operations) - size
    while begin > -size:
        operations = schedule.operations
        shorter = schedule.with_operations(operations[: max(0, begin)] + operations[begin + size :])
        if is_found(shorter):
            schedule = shorter
        begin -= size
    return schedule


def _plain(schedule: Schedule, is_found: Callable[[Schedule], bool]) -> Schedule:
    """Replace numbers of operations by 0 where this keeps the finding."""
    for number, (kind, who, choice) in enumerate(schedule.operations):
        for plain in (Operation(kind, 0, 0), Operation(kind, who, 0), Operation(kind, 0, choice)):
            operations = list(schedule.operations)
            operations[number] = plain
            simpler = schedule.with_operations(operations)
            if plain != schedule.operations[number] and is_found(simpler):
                schedule = simpler
                break
    return schedule
