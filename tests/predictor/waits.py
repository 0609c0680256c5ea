"""Shorter waits for threads of ``follow()``."""

from __future__ import annotations

import pytest

from delta_tracker.predictor import polling


def shorten_waits(
    monkeypatch: pytest.MonkeyPatch,
    *,
    back_off_seconds: float | None = None,
    gap_check_seconds: float | None = None,
    no_stream_seconds: float | None = None,
) -> None:
    """Shorten the waits after a fault, between checks for a gap, and for a stream to begin."""
    waits = {
        "_MAX_BACK_OFF_SECONDS": back_off_seconds,
        "GAP_CHECK_SECONDS": gap_check_seconds,
        "_NO_STREAM_SECONDS": no_stream_seconds,
    }
    for name, seconds in waits.items():
        if seconds is not None:
            monkeypatch.setattr(polling, name, seconds)
