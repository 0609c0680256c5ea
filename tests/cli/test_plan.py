"""``delta-tracker plan``: from numbers, from a stream, and its errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableStates
from tests.cli.commands import Cli, url_of
from tests.stream.streams import Writer

_PAGE = Path(__file__).parent.parent.parent / "delta_tracker" / "guide" / "operate.md"


def test_the_worked_example_of_the_docs_is_what_the_command_prints(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    match = re.search(r"```console\n\$ delta-tracker (plan (?:.*\\\n)*.*)\n([^`]*)```", _PAGE.read_text())
    assert match is not None
    arguments = match[1].replace("\\\n", " ").split()
    shown = [line.rstrip() for line in cli(*arguments).splitlines()]
    assert shown == match[2].splitlines()
    assert max(map(len, shown)) <= 80
    monkeypatch.delenv("COLUMNS")
    assert [line.rstrip() for line in cli(*arguments).splitlines()] == shown, "the same in a file"


def test_json_has_the_same_numbers(cli: Cli) -> None:
    arguments = ["plan", "--table", "100Mx64", "--changed", 0.01, "--ranks", 8, "--predictors", 50]
    found = cli.json(*arguments, "--bandwidth", 500, "--price-a", 5)
    assert (found["rows"], found["rows_per_version"], found["table_bytes"]) == (10**8, 500_000, 25_600_000_000)
    total, one = found["requests"]["total"], found["requests"]["predictor"]
    assert total["gets"] == pytest.approx(50 * one["gets"] + found["requests"]["publisher"]["gets"])
    assert found["bill"]["class_a"]["requests_per_day"] == pytest.approx(24 * (total["puts"] + total["lists"]))
    assert found["bill"]["class_a"]["cost_per_day"] == pytest.approx(
        5e-6 * found["bill"]["class_a"]["requests_per_day"]
    )
    assert found["bill"]["class_b"]["cost_per_day"] is None, "no price was given"
    assert found["start_seconds"]["longest"] == pytest.approx(found["start_bytes"]["longest"] / 500e6)
    assert found["stored_bytes"] is None


def test_several_tables_and_dtypes_add_up(cli: Cli) -> None:
    found = cli.json("plan", "--table", "2*1.5kx8:bf16", "--table", "10x4", "--changed", 1, "--encoding", "int8")
    assert (found["tables"], found["rows"], found["table_bytes"]) == (3, 3010, 2 * 1500 * 16 + 160)
    assert found["rows_per_version"] == 1505


def test_a_plan_from_a_stream_is_the_stream(cli: Cli, writer: Writer) -> None:
    found = cli.json("plan", "--from", url_of(writer), "--changed", 0.06, "--every", 60)
    assert (found["tables"], found["rows"], found["rows_per_version"]) == (1, 50, 3)
    inspected = cli.json("inspect", url_of(writer))
    sizes = {each["kind"]: each["bytes"] for each in inspected["versions"]}
    for kind in ("snapshot", "delta"):
        entry_bytes = inspected["log"]["entry_bytes"] / 5
        assert found[f"{kind}_bytes"] == pytest.approx(sizes[kind] + entry_bytes, rel=0.15)
    assert cli.json("plan", "--from", url_of(writer))["rows_per_version"] == 3, "observed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Error: Pass --table or --from."),
        (["--table", "1kx4", "--from", "x"], "Error: Pass --table or --from, not both."),
        (["--table", "1kx4"], "Pass --changed, the fraction of the rows that change in a minute"),
        (["--table", "1kx4", "--changed", "1%"], "'1%' is not a valid float"),
        (["--table", "1kx4", "--changed", "-1"], "-1.0 is not in the range x>=0"),
        (["--table", "4", "--changed", "1"], "--table='4'"),
        (["--table", "4x4:F64", "--changed", "1"], "['F32', 'F16', 'BF16']"),
        (["--table", "100000*4x4", "--changed", "1"], "at most 10000 tables"),
        (["--table", "4x0", "--changed", "1"], "dim"),
        (["--table", "4x3", "--changed", "1", "--encoding", "int4"], "Use INT8, or INT4 with an even number"),
        (["--table", "4x4", "--changed", "1", "-o", "a=b"], "only together with --from"),
        (["--table", "4x4", "--changd", "1"], "Did you mean '--changed'?"),
        (["--table", "4x4", "--changed", "nan"], "changed"),
        (["--table", "4x4", "--changed", "1", "--every", "inf"], "'--every': inf is not a number up to 1e+09"),
    ],
)
def test_invalid_calls_are_refused(cli: Cli, arguments: list[str], message: str) -> None:
    cli("plan", *arguments, code=2)
    assert message in " ".join(cli.err.split())


def test_streams_that_show_no_workload_are_refused(cli: Cli, tmp_path: Path) -> None:
    states = TableStates("EXACT_TEST", ((0, 4),), (StateSpec("sum", torch.float32, "columns"),))
    writer = Writer(Storage((tmp_path / "states").as_uri(), create=True), states=states)
    writer.snapshot()
    cli("plan", "--from", url_of(writer), code=2)
    assert "two deltas or more" in cli.err
    writer.delta([1])
    writer.delta([2])
    cli("plan", "--from", url_of(writer), code=2)
    assert "its states or raw ids are not part of a plan" in " ".join(cli.err.split())
    cli("plan", "--from", tmp_path / "nothing", code=2)
    assert "nothing' cannot be used. Check the URL" in cli.err


def test_one_table_is_singular(cli: Cli) -> None:
    cli("plan", "--table", "1kx4", "--changed", "1", "--ranks", 200_001, code=2)
    assert "Pass at most 200000 ranks for 1 table." in cli.err
