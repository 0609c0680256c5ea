"""Setting that runs the long sweeps completely, as ``make test-sweeps`` does."""

from __future__ import annotations

import os

SWEEPS_ARE_WHOLE = os.environ.get("DELTA_TRACKER_WHOLE_SWEEPS") == "1"
