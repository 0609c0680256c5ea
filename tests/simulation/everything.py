"""Import of all that a run may need: an import in the middle of a run takes locks, which later runs do not."""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress

import delta_tracker
from tests.simulation import ranks

_NAMES = [each.name for each in pkgutil.walk_packages(delta_tracker.__path__, "delta_tracker.")]
for _name in (*_NAMES, "tests.simulation.raw_ids", "torch._dynamo"):
    if not _name.endswith("__main__"):
        with suppress(ImportError):  # an extra is not installed
            importlib.import_module(_name)
ranks.install()
