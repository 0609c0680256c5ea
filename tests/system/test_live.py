"""Lookups during continuous apply: no torn rows, ascending versions, dense tensors switch only at a version's end."""

from __future__ import annotations

from pathlib import Path

from tests.tracker.long_run import serve_while_applying


def test_readers_during_continuous_apply(tmp_path: Path) -> None:
    counts = serve_while_applying(f"file://{tmp_path}/stream", num_versions=80)
    assert counts["torn rows"] == counts["wrong dense tensors"] == counts["steps back"] == 0
    assert counts["versions seen"] > 5
    assert counts["lookups while applying"] > 0
