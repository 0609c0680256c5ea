"""``delta-tracker assets``."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.cli.commands import Cli


def test_the_rules_and_the_dashboard_are_written(cli: Cli, tmp_path: Path) -> None:
    assert yaml.safe_load(cli("assets", "alerts"))["groups"]
    out = tmp_path / "dashboard.json"
    assert cli("assets", "dashboard", "--out", out) == ""
    assert json.loads(out.read_text())["panels"]
    assert cli.json("assets", "dashboard") == {"name": "dashboard", "text": out.read_text()}


def test_a_file_that_cannot_be_written_is_named(cli: Cli, tmp_path: Path) -> None:
    cli("assets", "alerts", "--out", tmp_path / "missing" / "alerts.yml", code=2)
    assert "Choose another path" in cli.err
