"""Comparison of a tracker with a copy of all rows; see the package."""

from __future__ import annotations

import json
import os
import warnings
import weakref
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch

from delta_tracker import ModelDeltaTracker
from delta_tracker.errors import DeltaTrackerError
from tests.tracker.tracking_cases import differing, rows_of

RESULTS = "DELTA_TRACKER_COMPARED"
"""Environment variable with the file to which each process appends a line for each model."""


class Found(dict[str, Any]):
    """What the comparison of one model or kernel has found."""

    def __init__(self) -> None:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        super().__init__(test=test, tables=0, reads=0, changed=0, more=0, faults=[], refused="")

    def compare(self, table: str, changed: set[int], reported: set[int]) -> None:
        """Compare the rows that a read reported with those that changed."""
        self["changed"] += len(changed)
        self["more"] += len(reported - changed)
        if not changed <= reported:
            self["faults"].append(f"{table}: rows {sorted(changed - reported)[:5]} are missing")

    def write(self) -> None:
        """Append it to the file of results."""
        with Path(os.environ[RESULTS]).open("a") as file:
            file.write(json.dumps(self) + "\n")


class Compared:
    """Tracker of one model, and the rows at its last read."""

    def __init__(self, model: Any) -> None:
        self._found = Found()
        self._tracker: ModelDeltaTracker | None = None
        try:
            self._tracker = _tracker(model)
        except DeltaTrackerError as error:
            self._found["refused"] = f"{type(error).__name__}: {error}"[:300]
            self._found.write()
            return
        self._rows = rows_of(self._tracker)
        self._found["tables"] = len(self._rows)
        reference = weakref.ref(self)
        model.register_forward_pre_hook(lambda *_: None if (me := reference()) is None else me.compare())
        # Processes of multiprocessing call it, and all others at their end.
        self._end = util.Finalize(self, self.end, exitpriority=100)

    @torch.no_grad()
    def compare(self) -> None:
        """Compare a read with the rows that differ from the copy."""
        if self._tracker is None:
            return
        now, delta = rows_of(self._tracker), self._tracker.get_delta()
        self._found["reads"] += 1
        for fqn, rows in now.items():
            held = delta[fqn]
            self._found.compare(fqn, set(differing(self._rows[fqn], rows)), set(held.ids.tolist()))
            if held.states is not None and len(held):
                before = self._rows[fqn][held.ids[held.known]]
                if not torch.equal(held.states[held.known], before):
                    self._found["faults"].append(f"{fqn}: wrong old values")
        self._rows = now

    def end(self) -> None:
        """Compare for the last time, and write the result."""
        if self._tracker is not None:
            self.compare()
            self._tracker.detach()
            self._tracker = None
            self._found.write()


def _tracker(model: Any) -> ModelDeltaTracker:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ModelDeltaTracker(model, mode="EMBEDDING")
        except DeltaTrackerError:
            return ModelDeltaTracker(model)
