"""The command line, on real streams: verify, diff, export, compact and the demo."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from delta_tracker.cli import compact as compact_command
from delta_tracker.cli import diff as diff_command
from delta_tracker.cli import export as export_command
from delta_tracker.cli import verify as verify_command
from delta_tracker.predictor.predictor import Predictor
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import PartReader
from delta_tracker.stream.log import StreamLog, entry_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import Cli, entry, flip, interrupted, make, path_of, url_of
from tests.stream.streams import FQN, Writer


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return make(tmp_path / "stream")


# verify


def test_verify_passes_what_is_whole(cli: Cli, writer: Writer) -> None:
    compact(writer.storage)
    compact(writer.storage, fold=0.01)
    found = cli.json("verify", url_of(writer))
    assert found["ok"]
    assert (found["entries"], found["merged"], found["findings"]) == (5, 2, [])
    assert found["bytes"] == sum(path.stat().st_size for path in path_of(writer, "parts").iterdir())
    assert cli("verify", url_of(writer)).startswith("all is well: 5 entries, 2 merged entries, ")


@pytest.mark.parametrize("reads_pieces", [False, True])
def test_verify_finds_every_byte_that_changed(
    cli: Cli, writer: Writer, reads_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reads_pieces:
        monkeypatch.setattr(verify_command, "_MEMORY_BYTES", 0)
    compact(writer.storage)
    paths = [path for folder in ("parts", "log", "merged") for path in sorted(path_of(writer, folder).iterdir())]
    assert len(paths) == 4 + 5 + 1 + 1
    for path in paths:
        good = path.read_bytes()
        for at in {0, len(good) // 3, len(good) - 1}:
            flip(path, at)
            found = json.loads(cli("verify", url_of(writer), "--json", code=1) or '{"findings": [{"where": "head"}]}')
            assert found["findings"], (path, at)
            path.write_bytes(good)
    assert cli.json("verify", url_of(writer))["ok"]


def test_verify_names_each_damage(cli: Cli, writer: Writer) -> None:
    url = url_of(writer)
    compact(writer.storage)
    (merged,) = path_of(writer, "merged").iterdir()
    parts = [path_of(writer, entry(writer, version).parts[0].name) for version in (1, 2, 3, 4)]
    flip(parts[0])
    parts[1].unlink()
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    rewritten = json.loads(merged.read_text())
    rewritten["merges"]["xxh3"] = "0" * 32
    rewritten["parent"]["xxh3"] = "0" * 32
    merged.write_text(json.dumps(rewritten))
    found = cli.json("verify", url, code=1)["findings"]
    expected = [
        (f"parts/{parts[0].name}", f"its xxh3 is not {entry(writer, 1).parts[0].xxh3}"),
        (f"parts/{parts[1].name}", "it does not exist"),
        (f"parts/{parts[2].name}", f"it has {parts[2].stat().st_size} bytes instead of"),
        (f"merged/{merged.name}", "it follows another version"),
        (f"merged/{merged.name}", "it stands for another version"),
    ]
    for each, (where, problem) in zip(found, expected, strict=True):
        assert each["where"] == where
        assert each["problem"].startswith(problem)
    assert all(each["is_in_the_way"] for each in found)
    quick = cli.json("verify", url, "--quick", code=1)["findings"]
    assert [each["where"] for each in quick] == [each["where"] for each in found[1:]]
    writer.snapshot()
    later = cli.json("verify", url, code=1)["findings"]
    assert not any(each["is_in_the_way"] for each in later)
    assert "new predictors do not read it" in cli("verify", url, code=1)


def test_verify_follows_the_chain(cli: Cli, writer: Writer) -> None:
    path = path_of(writer, entry_name(3))
    fields = json.loads(path.read_text())
    for change, problem in (
        ({"created": 1.0}, "it follows"),  # as the next entry notices
        ({"stream": "0" * 32}, "it is of stream"),
        ({"snapshot": None}, "as the newest snapshot"),
        ({"generation": 0}, "its generation 0 is below 1"),
    ):
        path.write_text(json.dumps(fields | change))
        assert problem in cli("verify", url_of(writer), code=1)
    path.unlink()
    assert "it is missing" in cli("verify", url_of(writer), code=1)


def test_verify_passes_over_what_retention_takes_meanwhile(
    cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.snapshot()

    def reader(storage: Storage, part, manifest: Manifest, **options) -> PartReader:
        if manifest.version in (1, 2):  # it goes upwards, each entry before its parts
            storage.delete(entry_name(manifest.version))
            storage.delete(part.name)
        return PartReader(storage, part, manifest, **options)

    monkeypatch.setattr(verify_command, "PartReader", reader)
    assert cli.json("verify", url_of(writer))["ok"]
    monkeypatch.undo()
    assert cli.json("verify", url_of(writer))["entries"] == 3  # what is left begins above version 0


def test_claims_that_retention_keeps_are_no_damage(cli: Cli, writer: Writer) -> None:
    again = Writer(writer.storage)
    again.snapshot()
    again.delta([1])
    retain(again.storage, Retention(versions=1, grace_seconds=0.0))
    assert StreamLog(again.storage).versions() == [0, 4, 5, 6, 7]
    url = url_of(again)
    assert cli.json("verify", url)["findings"] == []
    assert cli.json("verify", url, "--quick")["findings"] == []
    found = cli.json("inspect", url)
    assert (found["findings"], found["log"]["strays"]) == ([], 1)
    assert "1 entry: claims and the entries before them stay" in cli("inspect", url)
    report = cli.json("report", url)
    assert (report["faults"], report["versions"]["missing"]) == ([], 0)


# diff


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
    writer.table[4] = -writer.table[4] * 0.0  # -0.0 is other bits, and no way off
    writer.write("delta", [writer.rows([3, 4])])
    found = cli.json("diff", url_of(writer), 4, 5)
    assert [(each["row"], each["moved"]) for each in found["farthest"]] == [(3, None), (4, 0.0)]
    assert found["moved"]["max"] is None
    assert "nan" in cli("diff", url_of(writer), 4, 5)


def test_diff_says_what_it_lacks(cli: Cli, writer: Writer) -> None:
    cli("diff", url_of(writer), 1, 9, code=2)
    assert "versions up to 4" in cli.err
    cli("diff", url_of(writer), 1, 2, "--table", "ec.nothing", code=2)
    assert f"Name a table of version 1: {FQN}" in cli.err
    cli("diff", url_of(writer), 0, 2, code=1)
    assert "version 0 of" in cli.err
    assert "lies before the first snapshot" in cli.err
    assert "0 of 50 rows" in cli("diff", url_of(writer), 3, 3)


def test_diff_without_room_says_where(cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_command, "mapped", full_disk)
    cli("diff", url_of(writer), 1, 2, code=2)
    assert "TMPDIR" in cli.err
    assert "No space left on device" in cli.err


# export


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.INT8])
@pytest.mark.parametrize("reads_pieces", [False, True])
def test_export_is_what_a_predictor_holds(
    cli: Cli, tmp_path: Path, encoding: Encoding, reads_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reads_pieces:
        monkeypatch.setattr("delta_tracker.cli.versions._MEMORY_BYTES", 0)
    writer = make(tmp_path / "s", encoding=encoding)
    held = torch.full_like(writer.table, -1), torch.zeros(3, 2)
    predictor = Predictor({FQN: held[0], "over.weight": held[1]}, writer.storage)
    for version in (1, 3, 4):
        predictor.rollback(version)
        out = tmp_path / f"v{version}"
        found = cli.json("export", url_of(writer), "--version", version, "--out", out)
        assert found["files"] == ["dense.safetensors", f"{FQN}.weight.safetensors"]
        assert found["bytes"] == sum(path.stat().st_size for path in out.iterdir())
        state = load_file(out / f"{FQN}.weight.safetensors") | load_file(out / "dense.safetensors")
        cli("export", url_of(writer), "--version", version, "--out", f"{out}.pt", "--format", "torch")
        for each in (state, torch.load(f"{out}.pt", weights_only=True)):
            assert each.keys() == {f"{FQN}.weight", "over.weight"}
            assert torch.equal(each[f"{FQN}.weight"], held[0])
            assert torch.equal(each["over.weight"], held[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "v1", "v1.pt", "v3", "v3.pt", "v4", "v4.pt"]


def test_export_of_the_newest_version_and_of_odd_shapes(cli: Cli, tmp_path: Path) -> None:
    writer = make(tmp_path / "s", dtype=torch.bfloat16, dim=3)
    writer.dense = {
        "flag": torch.tensor([True]),
        "steps": torch.tensor(7),
        "none": torch.empty(0, 4),
        "half": torch.ones(3).half(),
    }
    writer.delta([1])
    cli("export", url_of(writer), "--out", tmp_path / "out")
    dense = load_file(tmp_path / "out" / "dense.safetensors")
    # Of a name that an older version alone has, that is what a predictor still holds.
    assert dense.keys() == {*writer.dense, "over.weight"}
    assert all(torch.equal(dense[name], tensor) for name, tensor in writer.dense.items())
    assert torch.equal(load_file(tmp_path / "out" / f"{FQN}.weight.safetensors")[f"{FQN}.weight"], writer.table)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_export_is_there_whole_or_not_at_all(
    cli: Cli, writer: Writer, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["export", url_of(writer), "--format", form, "--out"]
    (tmp_path / "mine").write_text("years of work")
    cli(*arguments, tmp_path / "mine", code=2)
    assert (tmp_path / "mine").read_text() == "years of work"
    cli(*arguments, tmp_path / "no" / "such" / "directory", code=2)
    flip(path_of(writer, entry(writer, 3).parts[0].name))
    cli(*arguments, tmp_path / "out", code=1)
    assert "corrupt" in cli.err
    monkeypatch.setattr(export_command, "write_rows", interrupted)
    cli(*arguments, tmp_path / "out", code=130)
    monkeypatch.setattr(export_command, "write_rows", full_disk)
    cli(*arguments, tmp_path / "out", code=2)
    assert "No space left on device" in cli.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "stream"]


def full_disk(*_: object) -> None:
    raise OSError(28, os.strerror(28))


# compact


def test_compact_leaves_less_to_read_and_the_same_rows(cli: Cli, writer: Writer) -> None:
    before = cli.json("inspect", url_of(writer))["new_predictor"]
    (merged,) = cli.json("compact", url_of(writer), "--fold", 0.01)["merged"]
    assert (merged["first"], merged["version"], merged["kind"]) == (0, 4, "snapshot")
    after = cli.json("inspect", url_of(writer))["new_predictor"]
    assert after["bytes"] < before["bytes"]
    assert after["versions"] == 1
    held = writer.model() | {"over.weight": torch.zeros(3, 2)}
    Predictor(held, writer.storage).sync()
    assert torch.equal(held[FQN], writer.table)
    assert cli("compact", url_of(writer)).startswith("nothing to merge")
    cli("compact", url_of(writer), "--fold", 0, code=2)
    cli("compact", url_of(writer), "--min-versions", 1, code=2)


def test_compact_beside_a_publisher_ends_and_breaks_nothing(
    cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*arguments, **options):
        found = compact(*arguments, **options)
        for number in range(3):
            writer.delta([number])
        return found

    monkeypatch.setattr(compact_command, "compact", busy)
    assert cli("compact", url_of(writer)).count("\n") == 1
    assert cli.json("verify", url_of(writer))["ok"]


def test_compact_that_is_interrupted_leaves_a_whole_stream(
    cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StreamLog, "create_merged", interrupted)
        cli("compact", url_of(writer), code=130)
    assert cli.json("verify", url_of(writer))["ok"]
    assert cli.json("compact", url_of(writer))["merged"]


# demo


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
