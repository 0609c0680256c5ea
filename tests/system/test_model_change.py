"""Rollout of a changed model with real processes: predictors first, and trainer first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked
from tests.system.model_change_cases import SIZES
from tests.waiting import eventually


class _Rollout:
    """Processes on one stream. Each predictor has served at all times since it began."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, (folder / "stream").as_uri()
        self.running: dict[str, forked.Program] = {}

    def begin(self, name: str, *arguments: str) -> None:
        former = self.running.pop(name, None)
        if former is not None:
            former.kill()
            former.wait(60)
        role = arguments[0]
        command = ("tests.system.model_change_cases", role, self.url, str(self.folder), *arguments[1:])
        output = self.folder / f"{name}.txt"
        self.running[name] = forked.Program(*command, output=output, errors=output)

    def predictor(self, name: str, which: str, rule: str) -> None:
        self.begin(name, "predictor", which, rule, name)

    def served(self, name: str) -> dict[str, Any]:
        """Return what a predictor wrote last, after a check of its rows against those of the trainer."""
        path = self.folder / f"{name}.served"
        if not path.exists():
            return {"version": -1, "error": None, "differences": (), "pid": 0}
        held: dict[str, Any] = torch.load(path, weights_only=False)
        trained = self.folder / f"{held['version']}.trained"
        if trained.exists() and held["applying"] is None:
            tables = torch.load(trained)
            for fqn, table in held["tables"].items():
                if fqn in tables and tables[fqn].shape == table.shape:
                    assert torch.equal(table, tables[fqn]), (name, fqn, held["version"])
        return held

    def until(self, name: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait for a state of a predictor, while all processes run."""

        def is_there() -> object:
            for each, process in self.running.items():
                assert process.poll() is None, (self.folder / f"{each}.txt").read_text()
            return condition(self.served(name))

        eventually(is_there, lambda: {key: self.served(name)[key] for key in ("version", "error", "differences")})
        return self.served(name)

    def newest(self) -> int:
        return max((int(path.stem) for path in self.folder.glob("*.trained")), default=-1)


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[_Rollout]:
    rollout = _Rollout(tmp_path)
    try:
        yield rollout
    finally:
        for process in rollout.running.values():
            process.kill()
            process.wait(60)


@pytest.mark.parametrize("first", ["predictors", "trainer"])
def test_a_changed_model_is_rolled_out_without_a_pause(rollout: _Rollout, first: str) -> None:
    rollout.begin("trainer", "trainer", "old")
    rollout.predictor("old", "old", "stop")
    rollout.until("old", lambda held: held["version"] > 3)
    if first == "predictors":
        rollout.predictor("new", "new", "continue")
        held = rollout.until("new", lambda held: held["version"] > 5)
        assert [each for each in held["differences"] if "left out" in each] == [
            "table 'wider' is 20 x 4 float32 in the stream but 20 x 8 float32 in the model: it is left out",
            "table 'removed' is 20 x 4 float32 in the stream but missing in the model: it is left out",
        ]
    rollout.begin("trainer", "trainer", "new")
    stopped = rollout.until("old", lambda held: "does not fit" in (held["error"] or ""))
    before = rollout.newest()
    if first == "trainer":
        rollout.predictor("new", "new", "continue")
    rollout.until("new", lambda held: held["version"] > before and not held["differences"])
    rollout.predictor("old", "old", "stop")  # restarts with its position, as after a crash
    again = rollout.until("old", lambda held: held["error"] and held["pid"] != stopped["pid"])
    assert again["version"] == stopped["version"]
    assert all(torch.equal(table, stopped["tables"][fqn]) for fqn, table in again["tables"].items())
    rollout.begin("trainer", "trainer", "old")  # the change is taken back
    before = rollout.newest()
    rollout.until("old", lambda held: held["version"] > before and held["error"] is None)
    held = rollout.until("new", lambda held: held["differences"])
    assert set(held["tables"]) == set(SIZES["new"])
