"""Findings that are known: rules that do not hold yet, each with a schedule that shows it.

A sweep counts findings of these rules, but does not fail for them. If a schedule shows its finding no more, delete it
here: its rule then holds for every schedule.
"""

from __future__ import annotations

from tests.simulation.values import Schedule

KNOWN: dict[str, tuple[str, Schedule]] = {}
"""Words for what happens, to the rule that it breaks and a schedule."""

KNOWN_RULES = frozenset(rule for rule, _ in KNOWN.values())
