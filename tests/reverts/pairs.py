"""Rules of releases that fit each other."""

from __future__ import annotations

from tests.reverts.revert import Revert

_PAIRS = "delta_tracker/sharding/pairs.py"
_TEST = "tests/sharding/test_pairs.py::test_a_pair_that_does_not_fit_is_refused_at_the_first_use"

REVERTS = [
    Revert(
        defect="an FBGEMM for another torch is loaded",
        generator=_TEST,
        edits={"delta_tracker/tracker/tracker.py": [("\ncheck_pair()\n", "\n")]},
    ),
    Revert(
        defect="FBGEMM for CUDA is accepted next to a CPU build of torch",
        generator=_TEST,
        edits={_PAIRS: [('if torch.endswith("+cpu") and cuda:', "if False:")]},
    ),
]
