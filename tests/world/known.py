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


KNOWN: dict[str, tuple[str, Schedule]] = {
    # The mirror begins above the claim of the promotion that it has copied, and the pointer names no entry below.
    "a promotion before the first entry of a mirror over http": (
        "behind a promotion over http",
        _schedule(
            "publish 0 0",
            "join 0 1",
            "sync 0 0",
            "mirror 1 0",
            "snapshot 0 0",
            "mirror 0 0",
            "lose 0 0",
            "promote 1 0",
            has_web=True,
        ),
    ),
}
"""Words for what happens, to the rule that it breaks and a schedule."""

KNOWN_RULES = frozenset(rule for rule, _ in KNOWN.values())
