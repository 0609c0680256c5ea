"""How long tests search: the setting of ``make test-sweeps``, and the number of examples of random tests."""

from __future__ import annotations

import os

from hypothesis import settings

SWEEPS_ARE_WHOLE = os.environ.get("DELTA_TRACKER_WHOLE_SWEEPS") == "1"


def num_examples(count: int) -> int:
    """Return ``count``, or more if a fix is reverted, so that the defect is found in each run and not only in most."""
    return 8 * count if settings.get_current_profile_name() == "reverts" else count
