"""``fleet``: totals, hosts, the pin and the exit codes."""

from __future__ import annotations

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


def test_a_thousand_heartbeats_cost_at_most_a_thousand_and_one_requests(cli: Cli, writer: Writer) -> None:
    for number in range(1000):
        leave(writer, beat(writer, f"p-{number}", version=4, window=_CURRENT))
    assert cli.json("fleet", url_of(writer))["requests"] == 1001
    found = cli.json("fleet", url_of(writer), "--limit", 10)
    assert (found["requests"], found["left_out"]) == (11, 990)


def test_the_pin_is_shown(cli: Cli, writer: Writer) -> None:
    cli("rollback", url_of(writer), 2, "--reason", "bad")
    leave(writer, beat(writer, "obeys", version=2, window=_STUCK, pin=1))
    found = cli.json("fleet", url_of(writer))
    assert (found["states"], found["pin"]["version"]) == ({"pinned": 1}, 2)
    assert "pin 1: version 2 of 4 bad" in cli("fleet", url_of(writer))
