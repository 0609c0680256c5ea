"""Preparation of a process for simulated worlds: a run after others must be the same as the first one."""

from __future__ import annotations

import gc
import importlib
import pkgutil
from contextlib import suppress
from dataclasses import replace

import torch

import delta_tracker
from tests.simulation.ranks import install
from tests.simulation.threads import SCHEDULER
from tests.simulation.values import generate
from tests.simulation.world import run


def prepare() -> None:
    """Import all that a run may need, and run a world of each kind: both take locks, which later runs do not."""
    torch.set_num_threads(1)  # tensors are small, and threads of OpenMP are lost in a fork
    names = [each.name for each in pkgutil.walk_packages(delta_tracker.__path__, "delta_tracker.")]
    for name in (*names, "tests.simulation.raw_ids", "torch._dynamo"):
        if not name.endswith("__main__"):
            with suppress(ImportError):  # an extra is not installed
                importlib.import_module(name)
    install()
    for ranks, has_raw_ids in ((2, False), (2, True), (1, True), (1, False)):  # torchrec keeps some results
        run(replace(generate(1), ranks=ranks, has_raw_ids=has_raw_ids))
    SCHEDULER.restart(0)  # frees the groups, whose threads are lost in a fork
    gc.freeze()  # each run collects garbage, which is faster without what stays
