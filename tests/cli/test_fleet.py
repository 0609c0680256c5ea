"""``fleet``: totals, hosts, the pin and the exit codes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from delta_tracker import ModelTarget, Predictor, Rollout
from delta_tracker.stream.reading.canary import Canary
from tests.cli.commands import Cli, beat, leave, url_of
from tests.heartbeats import read_heartbeats
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


def test_a_new_error_is_shown_before_the_state_changes(cli: Cli, writer: Writer) -> None:
    leave(writer, beat(writer, "first", version=3, window=_CURRENT))
    leave(writer, beat(writer, "holds", version=4, window=_CURRENT, error="HeldVersionError: version 5 has NaN"))
    found = cli.json("fleet", url_of(writer))
    assert (found["states"], {each["name"] for each in found["shown"]}) == ({"current": 2}, {"first", "holds"})
    assert "holds has an error: HeldVersionError: version 5 has NaN" in cli("fleet", url_of(writer))


def test_a_long_error_leaves_the_table_readable(cli: Cli, writer: Writer) -> None:
    leave(writer, beat(writer, "bad", host="host-7", version=1, window=_STUCK, error="cannot be read " * 60))
    lines = cli("fleet", url_of(writer), code=1).splitlines()
    assert any(re.fullmatch(r"bad +✕ failing +host-7 +\d+ m?s +1 +1 +500 ms +2 *", line) for line in lines)
    assert any(line.startswith("bad has an error: cannot be read cannot") for line in lines)


def test_why_a_predictor_keeps_its_version_is_shown(cli: Cli, writer: Writer) -> None:
    predictor = Predictor(
        ModelTarget(writer.model(), dense=False), writer.storage, name="pinned", rollout=Rollout(follows_pins=True)
    )
    cli("rollback", url_of(writer), 2)
    predictor.sync()
    assert [each["why"] for each in cli.json("fleet", url_of(writer))["shown"]] == ["pinned to version 2"]
    assert "pinned: pinned to version 2" in cli("fleet", url_of(writer)).splitlines()


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
    assert re.search("rolled back from version 4 to 2, .* ago: bad\n", cli("fleet", url_of(writer)))


def test_a_predictor_that_ignores_a_pin_has_exit_code_1(cli: Cli, writer: Writer) -> None:
    printed = cli("rollback", url_of(writer), 2)
    assert "fleet shows them as unpinned" in printed
    assert "call publisher.snapshot() in the repaired trainer" in printed
    writer.delta([1])
    leave(writer, beat(writer, "ignores", version=5, window=((10.0, 5, 0), (5.0, 5, 0), (0.0, 5, 0))))
    assert cli.json("fleet", url_of(writer), code=1)["states"] == {"unpinned": 1}
    assert "1 unpinned" in cli("fleet", url_of(writer), code=1)


def test_a_fleet_that_is_silent_as_a_whole_has_exit_code_1(cli: Cli, writer: Writer) -> None:
    assert cli.json("fleet", url_of(writer))["states"] == {}
    leave(writer, beat(writer, "gone", host="b", window=_CURRENT), seconds_ago=60)
    assert cli.json("fleet", url_of(writer), code=1)["states"] == {"silent": 1}
    leave(writer, beat(writer, "good", host="a", version=4, window=_CURRENT))
    text = cli("fleet", url_of(writer))
    assert re.search(r"version 4, committed .* ago; predictors: 1 current, 1 silent", text)
    assert "gone: no data since " in text


def test_a_predictor_that_was_stopped_is_no_fault(cli: Cli, writer: Writer) -> None:
    stopped = beat(writer, "old", host="b", window=_STUCK, error="ModelMismatchError", differences="a", seconds=0.0)
    leave(writer, stopped, seconds_ago=600)
    found = cli.json("fleet", url_of(writer))
    assert found["states"] == {"stopped": 1}
    assert found["hosts"]["b"]["worst_lag"] is None
    assert "needs attention" not in cli("inspect", url_of(writer)).lower()


def test_a_canary_after_a_release_waits_and_is_not_stuck(cli: Cli, writer: Writer, tmp_path: Path) -> None:
    target = ModelTarget(writer.model(), dense=False)
    rollout = Rollout(canary=Canary(versions=3), follows_pins=True)
    before = Predictor(target, writer.storage, rollout=rollout, name="canary")
    assert before.sync() == 1
    cli("rollback", url_of(writer), 2)
    writer.snapshot()
    cli("release", url_of(writer))
    canary = Predictor(target, writer.storage, rollout=rollout, name="canary")  # restarted: it looks for pins at once
    canary.load_state_dict(before.state_dict())
    assert canary.sync() == 1, "the versions before the release may be bad"
    (sent,) = read_heartbeats(writer.storage)
    window = tuple((5.0 * (9 - number), sent.version, 1 + number // 3) for number in range(10))
    leave(writer, sent := replace(sent, window=window))  # what it would write 45 seconds later
    assert cli.json("fleet", url_of(writer))["states"] == {"waiting": 1}
    found = cli.json("report", url_of(writer), "--out", tmp_path / "r.html")
    assert [each["health"] for each in found["predictors"]] == ["waiting"]
    for number in range(3):
        writer.delta([number])
    assert canary.sync() == 5
    leave(writer, sent)
    assert cli.json("fleet", url_of(writer), code=1)["states"] == {"stuck": 1}, "it might have moved"


def test_a_report_of_a_stream_with_a_predictor_of_another_one(cli: Cli, writer: Writer, tmp_path: Path) -> None:
    leave(writer, beat(writer, "other", stream="1" * 32, window=_CURRENT))
    found = cli.json("report", url_of(writer), "--out", tmp_path / "r.html")
    assert [each["health"] for each in found["predictors"]] == ["elsewhere"]
    assert "another stream" in (tmp_path / "r.html").read_text()


def test_a_report_has_the_hosts_and_the_health_of_predictors(cli: Cli, writer: Writer, tmp_path: Path) -> None:
    leave(writer, beat(writer, "good", host="a", version=4, window=_CURRENT))
    leave(writer, beat(writer, "bad", host="b", version=1, window=_STUCK))
    cli("rollback", url_of(writer), 2, "--reason", "why it was")
    found = cli.json("report", url_of(writer), "--out", tmp_path / "report.html")
    assert [(each["name"], each["host"], each["health"]) for each in found["predictors"]] == [
        ("bad", "b", "stuck"),
        ("good", "a", "current"),
    ]
    versions = {"lowest": 1, "median": 1, "highest": 1, "worst_lag": 1}
    assert found["hosts"]["b"] == {"predictors": 1, "silent": 0} | versions
    page = (tmp_path / "report.html").read_text()
    assert re.search("Pinned to version 2 for .*: why it was", page)
    assert page.index("✕ stuck<") < page.index(">current<")


def test_without_predictors_no_empty_table_is_shown(cli: Cli, writer: Writer) -> None:
    (line,) = cli("fleet", url_of(writer)).splitlines()
    assert "predictors: none" in line
