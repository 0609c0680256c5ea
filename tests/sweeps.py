"""How long tests search: sweeps, their long forms, and the number of examples of random tests.

A test with a long form is marked ``@pytest.mark.sweep("short")`` if the long form takes up to half a minute, else
``@pytest.mark.sweep("long")``. With ``only=True`` it has no other form and runs only as a sweep. The environment
variable ``DELTA_TRACKER_WHOLE_SWEEPS`` selects the long forms:

=========  =====================================================
``short``  run only the sweeps marked ``"short"``
``daily``  run only a tenth of these, as CI does: another one on each of ten days
``rest``   run all tests but those of ``daily``, as CI does, so that no test runs in both of its forms
``long``   run only the sweeps marked ``"long"``
``1``      run all tests, with the long form of each sweep
=========  =====================================================
"""

from __future__ import annotations

import os
import time
from zlib import crc32

import pytest
from hypothesis import settings

FORMS = ("short", "long")

_DAYS = 10
_DAY_SECONDS = 24 * 60 * 60

_CHOICE = os.environ.get("DELTA_TRACKER_WHOLE_SWEEPS", "")
assert _CHOICE in {"", "1", "daily", "rest", *FORMS}, (
    f"DELTA_TRACKER_WHOLE_SWEEPS={_CHOICE!r}: set it to short, daily, rest, long or 1"
)

SWEEPS_ARE_WHOLE = _CHOICE not in {"", "rest"}


def num_examples(count: int) -> int:
    """Return ``count``, or more if a fix is reverted, so that the defect is found in each run and not only in most."""
    return 8 * count if settings.get_current_profile_name() == "reverts" else count


def form(item: pytest.Item) -> str | None:
    """Return the target that runs the long form of a test, ``"short"`` or ``"long"``; None if it has no long form."""
    forms = {mark.args[0] for mark in item.iter_markers("sweep")}
    assert forms <= set(FORMS), f"{item.nodeid}: mark it with sweep({FORMS[0]!r}) or sweep({FORMS[1]!r}), not {forms}"
    return max(forms, key=FORMS.index, default=None)


def is_selected(item: pytest.Item, choice: str = _CHOICE) -> bool:
    """Return True if a test runs with a choice of sweeps, by default the current one."""
    if choice in {"daily", "rest"}:
        return _is_of_today(item) == (choice == "daily")
    return choice not in FORMS or form(item) == choice


def _is_of_today(item: pytest.Item) -> bool:
    """Return True if CI runs the long form of a test today."""
    return form(item) == "short" and crc32(item.nodeid.encode()) % _DAYS == int(time.time() // _DAY_SECONDS) % _DAYS


def skip_if_only_a_sweep(item: pytest.Item) -> None:
    """Skip a test that runs only as a sweep, unless sweeps run."""
    if not SWEEPS_ARE_WHOLE and any(mark.kwargs.get("only") for mark in item.iter_markers("sweep")):
        item.add_marker(pytest.mark.skip(reason="`make test-sweeps` or `make test-long-sweeps` runs it"))
