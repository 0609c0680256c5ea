"""Findings that are known: rules that do not hold yet, each with a minimised schedule that shows it.

A sweep counts findings of these rules, but does not fail for them. If a schedule shows its finding no more, delete it
here: its rule then holds for every schedule.
"""

from __future__ import annotations

from tests.world.values import Schedule, operations


def _schedule(*texts: str, has_web: bool = False) -> Schedule:
    return Schedule(
        seed=0, states=False, encoding=None, skips_unchanged=False, operations=operations(texts), has_web=has_web
    )


# Numbers of ``join`` for a predictor with the stores [a, b], and of ``restart`` with its state and with [b, a].
_JOIN, _TURN = "join 0 1", "restart 0 2"

KNOWN: dict[str, tuple[str, Schedule]] = {
    # The predictor has a version that the mirror lacks when it is promoted. No source qualifies ever after.
    "ahead of a promoted mirror": (
        "behind a promotion",
        _schedule("publish 0 0", "mirror 0 0", "publish 0 0", _JOIN, "sync 0 0", "lose 0 0", "promote 0 0"),
    ),
    # The mirror begins above the version of the predictor.
    "below a promoted mirror": (
        "behind a promotion",
        _schedule("publish 0 0", _JOIN, "sync 0 0", "snapshot 0 0", "mirror 0 0", "lose 0 0", "promote 0 0"),
    ),
    # A restart with [mirror, source]. The mirror lacks the entry of the position, so its stream counts as another.
    "a restart at a mirror that lags": (
        "backwards after a restart",
        _schedule("publish 0 0", "mirror 0 0", "publish 0 0", _JOIN, "sync 0 0", _TURN, "sync 0 0"),
    ),
    # The same while the mirror is empty: the predictor waits there for ever, although the source has the next version.
    "a restart at an empty mirror": (
        "behind at a mirror",
        _schedule("publish 0 0", _JOIN, "sync 0 0", _TURN),
    ),
    # The source is lost, and its mirror begins above the version of the predictor.
    "below a mirror of a lost source": (
        "behind at a lost source",
        _schedule("publish 0 0", _JOIN, "sync 0 0", "snapshot 0 0", "mirror 0 0", "lose 0 0"),
    ),
    # Two mirrors of a lost source: the first one is readable, and shorter than the second one.
    "the shorter of two mirrors": (
        "behind at a shorter mirror",
        _schedule("publish 0 0", "mirror 1 0", "publish 0 0", "mirror 0 0", "join 0 7", "lose 0 0"),
    ),
    # The mirror begins above the pinned version and so never gets the pin. The other url of the predictor has it.
    "a pin that a mirror cannot copy": (
        "beyond a pin",
        _schedule("publish 0 0", "snapshot 0 0", "mirror 0 0", "join 0 11", "pin 1 1"),
    ),
}
"""Words for what happens, to the rule that it breaks and a schedule."""

KNOWN_RULES = frozenset(rule for rule, _ in KNOWN.values())
