"""``fleet``: totals, hosts, the pin and the exit codes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.commands import Cli, beat, leave, url_of
from tests.stream.streams import Writer

_STUCK = ((10.0, 1, 3), (5.0, 1, 3), (0.0, 1, 3))
_CURRENT = ((10.0, 3, 1), (5.0, 4, 0), (0.0, 4, 0))


def test_a_stuck_predictor_has_exit_code_1(cli: Cli, writer: Writer) -> None:
    leave(writer, beat(writer, "good", host="a", version=4, window=_CURRENT))
    assert cli.json("fleet", url_of(writer))["states"] == {"current": 1}
    leave(writer, beat(writer, "bad", host="b", window=_STUCK))
    leave(writer, beat(writer, "gone", host="b", window=_CURRENT), seconds_ago=60)
    found = cli.json("fleet", url_of(writer), code=1)
    assert found["states"] == {"current": 1, "silent": 1, "stuck": 1}
    assert found["hosts"]["a"]["median"] == 4
    assert found["hosts"]["b"]["predictors"] == 2
    assert {each["name"] for each in found["shown"]} == {"bad", "gone"}
    text = cli("fleet", url_of(writer), code=1)
    assert "1 current, 1 silent, 1 stuck" in text


def test_a_thousand_heartbeats_cost_a_request_each_and_a_few_more(cli: Cli, writer: Writer) -> None:
    for number in range(1000):
        leave(writer, beat(writer, f"p-{number}", version=4, window=_CURRENT))
    num_requests = cli.json("fleet", url_of(writer))["requests"]
    assert 1001 <= num_requests <= 1001 + 10
    found = cli.json("fleet", url_of(writer), "--limit", 10)
    assert (num_requests - found["requests"], found["left_out"]) == (990, 990)


def test_the_pin_is_shown(cli: Cli, writer: Writer) -> None:
    cli("rollback", url_of(writer), 2, "--reason", "bad")
    leave(writer, beat(writer, "obeys", version=2, window=_STUCK, pin=1))
    found = cli.json("fleet", url_of(writer))
    assert (found["states"], found["pin"]["version"]) == ({"pinned": 1}, 2)
    assert "ago: version 2 of 4 bad" in cli("fleet", url_of(writer))


def test_heartbeats_that_are_older_than_a_day_are_removed(cli: Cli, writer: Writer) -> None:
    for name, seconds in {"new": 0, "hours": 80_000, "days": 100_000, "weeks": 1_000_000}.items():
        leave(writer, beat(writer, name, version=4, window=_CURRENT), seconds_ago=seconds)
    assert cli.json("fleet", url_of(writer))["removed"] == 0
    assert len(writer.storage.names("predictors")) == 4
    assert cli.json("fleet", url_of(writer), "--remove")["removed"] == 2
    assert writer.storage.names("predictors") == ["predictors/hours.json", "predictors/new.json"]
    assert "removed 0 heartbeats" in cli("fleet", url_of(writer), "--remove")


def test_a_report_has_the_hosts_and_the_health_of_predictors(cli: Cli, writer: Writer, tmp_path: Path) -> None:
    leave(writer, beat(writer, "good", host="a", version=4, window=_CURRENT))
    leave(writer, beat(writer, "bad", host="b", version=1, window=_STUCK))
    cli("rollback", url_of(writer), 2, "--reason", "why it was")
    found = cli.json("report", url_of(writer), "--out", tmp_path / "report.html")
    assert [(each["name"], each["host"], each["health"]) for each in found["predictors"]] == [
        ("bad", "b", "stuck"),
        ("good", "a", "current"),
    ]
    assert found["hosts"]["b"] == {"predictors": 1, "lowest": 1, "median": 1, "highest": 1, "worst_lag": 1}
    page = (tmp_path / "report.html").read_text()
    assert re.search("Pinned to version 2 for .*: why it was", page)
    assert page.index(">stuck<") < page.index(">current<")
