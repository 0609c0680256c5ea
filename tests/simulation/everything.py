"""Import of all that a run may need: an import in the middle of a run takes locks, which later runs do not."""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import suppress
from dataclasses import replace

import torch

import delta_tracker
from tests.simulation import ranks
from tests.simulation.threads import SCHEDULER
from tests.simulation.values import generate
from tests.simulation.world import run

_NAMES = [each.name for each in pkgutil.walk_packages(delta_tracker.__path__, "delta_tracker.")]
for _name in (*_NAMES, "tests.simulation.raw_ids", "torch._dynamo"):
    if not _name.endswith("__main__"):
        with suppress(ImportError):  # an extra is not installed
            importlib.import_module(_name)
torch.set_num_threads(1)  # tensors are small, and threads of OpenMP are lost in a fork
ranks.install()
for _settings in ({"ranks": 2}, {"has_raw_ids": True, "ranks": 1}, {"ranks": 1}):  # torchrec keeps some results
    run(replace(generate(1), **_settings))
SCHEDULER.restart(0)  # frees the groups, whose threads are lost in a fork
