"""Findings that are known: rules that do not hold yet, each with a schedule that shows it.

A sweep counts findings of these rules, but does not fail for them. If a schedule shows its finding no more, delete it
here: its rule then holds for every schedule.
"""

from __future__ import annotations

from tests.simulation.values import Schedule, generate

KNOWN: dict[str, tuple[str, Schedule]] = {
    "a store that shows only a former stream, and its pin, leads back to it": ("former pin", generate(75_000_150)),
    "a thread that follows has read past a cache a short time ago": ("copies", generate(75_000_123)),
}
"""Words for what happens, to the rule that it breaks and a schedule."""

KNOWN_RULES = frozenset(rule for rule, _ in KNOWN.values())
