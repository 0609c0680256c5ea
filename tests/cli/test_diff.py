"""``delta-tracker diff`` against a loop over all rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta_tracker.cli import diff as diff_command
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import Cli, full_disk, make_owned, url_of
from tests.stream.streams import FQN, Writer


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_diff_is_what_a_loop_over_all_rows_finds(
    data: st.DataObject, cli: Cli, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    writer = Writer(Storage(tmp_path_factory.mktemp("s").as_uri()), num_rows=12, dim=3, dtype=dtype)
    tables: dict[int, torch.Tensor] = {}
    for is_snapshot in [True, *data.draw(st.lists(st.booleans(), min_size=1, max_size=5))]:
        if is_snapshot:
            writer.table[data.draw(st.integers(0, 11)), data.draw(st.integers(0, 2))] += 1
            manifest = writer.snapshot()
        else:
            manifest = writer.delta(sorted(data.draw(st.sets(st.integers(0, 11)))))
        tables[manifest.version] = writer.table.clone()
    if data.draw(st.booleans()):
        compact(writer.storage)
    v1, v2 = data.draw(st.sampled_from([*tables])), data.draw(st.sampled_from([*tables]))
    found = cli.json("diff", url_of(writer), v1, v2, "--limit", 5)
    moved = {}
    for row, (one, other) in enumerate(zip(tables[v1].tolist(), tables[v2].tolist(), strict=True)):
        if one != other:
            moved[row] = math.dist(one, other)
    assert found["changed"] == len(moved)
    farthest = sorted(moved.items(), key=lambda item: (-item[1], item[0]))[:5]
    assert [each["row"] for each in found["farthest"]] == [row for row, _ in farthest]
    assert [each["moved"] for each in found["farthest"]] == pytest.approx([length for _, length in farthest])
    for each in found["farthest"]:
        assert each["length_before"] == pytest.approx(math.hypot(*tables[v1][each["row"]].tolist()))
    if moved:
        assert found["moved"]["max"] == pytest.approx(max(moved.values()))
        assert found["moved"]["mean"] == pytest.approx(sum(moved.values()) / len(moved))


def test_diff_of_rows_that_are_no_numbers(cli: Cli, writer: Writer) -> None:
    writer.table[3] = math.nan
    writer.table[4] = -writer.table[4] * 0.0  # -0.0 has other bits at distance 0
    writer.write("delta", [writer.rows([3, 4])])
    found = cli.json("diff", url_of(writer), 4, 5)
    assert [(each["row"], each["moved"]) for each in found["farthest"]] == [(3, None), (4, 0.0)]
    assert found["moved"]["max"] is None
    assert "nan" in cli("diff", url_of(writer), 4, 5)


def test_diff_says_what_it_lacks(cli: Cli, writer: Writer) -> None:
    cli("diff", url_of(writer), 1, 9, code=2)
    assert "versions up to 4" in cli.err
    cli("diff", url_of(writer), 1, 2, "--table", "ec.nothing", code=2)
    assert f"Pass a table of version 1: {FQN}" in cli.err
    cli("diff", url_of(writer), 0, 2, code=1)
    assert "version 0 of" in cli.err
    assert "precedes the first snapshot" in cli.err
    assert "0 of 50 rows" in cli("diff", url_of(writer), 3, 3)


def test_diff_without_room_says_where(cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_command, "mapped", full_disk)
    cli("diff", url_of(writer), 1, 2, code=2)
    assert "TMPDIR" in cli.err
    assert "No space left on device" in cli.err


def test_diff_of_raw_ids(cli: Cli, writer: Writer, tmp_path: Path) -> None:
    owned = make_owned(tmp_path / "owned")
    found = cli.json("diff", url_of(owned), 1, 3, "--ids")
    assert (found["changed"], found["rows"]) == (4, 50)
    assert [tuple(each.values()) for each in found["owners"]] == [
        (0, 100, None),
        (1, 101, 107),
        (5, None, 100),
        (30, None, 900),
    ]
    assert len(cli.json("diff", url_of(owned), 1, 3, "--ids", "--limit", 1)["owners"]) == 1
    assert cli.json("diff", url_of(owned), 2, 2, "--ids")["changed"] == 0
    shown = cli("diff", url_of(owned), 3, 1, "--ids")
    assert "4 of 50 rows" in shown
    assert "raw id at 3" in shown
    cli("diff", url_of(writer), 1, 2, "--ids", code=2)
    assert "Table ec.embeddings.t has no raw ids. Omit --ids." in cli.err
