"""Whether the long sweeps run whole; ``make test-sweeps`` asks for that."""

from __future__ import annotations

import os

SWEEPS_ARE_WHOLE = os.environ.get("DELTA_TRACKER_WHOLE_SWEEPS") == "1"
