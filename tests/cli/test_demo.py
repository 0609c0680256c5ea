"""``delta-tracker demo`` leaves a stream that the other commands can read."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.cli.commands import Cli


def test_demo_leaves_a_stream_for_the_other_commands(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "demo"
    found = cli.json("demo", "--seconds", 0.5, "--every", 0.1, "--out", out)
    assert found["equal"]
    assert found["deltas"] >= 1
    assert cli.json("verify", out)["ok"]
    assert cli.json("inspect", out)["predictors"][0]["name"] == "demo-predictor"
    cli("demo", "--out", out, code=2)
    (tmp_path / "file").touch()
    cli("demo", "--out", tmp_path / "file", code=2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert "bit for bit" in cli("demo", "--seconds", 0.3)
    assert [path.is_dir() for path in tmp_path.glob("delta-tracker-demo-*")] == [True]
