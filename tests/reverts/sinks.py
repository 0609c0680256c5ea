"""Fixes in the sinks, and in the names, buckets and spans that they export."""

from __future__ import annotations

from tests.reverts.revert import Revert

_SINKS = "tests/monitor/test_sinks.py::"

REVERTS = [
    Revert(
        defect="two stats have one name in Prometheus, which drops one of them",
        generator=_SINKS + "test_every_accepted_stat_reaches_prometheus",
        edits={"delta_tracker/monitor/registry.py": [("                self._check_exposed(definition)\n", "")]},
    ),
]
