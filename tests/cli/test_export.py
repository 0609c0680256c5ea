"""``delta-tracker export``: its files hold what a predictor holds, whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from delta_tracker.cli import export as export_command
from delta_tracker.predictor.predictor import Predictor
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import entry_name
from tests.cli.commands import (
    IDENTITY,
    Cli,
    entry,
    flip,
    full_disk,
    interrupted,
    make,
    make_owned,
    path_of,
    url_of,
)
from tests.stream.streams import FQN, Writer


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.INT8])
@pytest.mark.parametrize("reads_pieces", [False, True])
def test_export_is_what_a_predictor_holds(
    cli: Cli, tmp_path: Path, encoding: Encoding, reads_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reads_pieces:
        monkeypatch.setattr("delta_tracker.cli.version_tables._MEMORY_BYTES", 0)
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
        assert state.keys() == {f"{FQN}.weight", "over.weight"}
        assert torch.equal(state[f"{FQN}.weight"], held[0])
        assert torch.equal(state["over.weight"], held[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "v1", "v3", "v4"]


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


def test_export_is_there_whole_or_not_at_all(
    cli: Cli, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["export", url_of(writer), "--out"]
    (tmp_path / "mine").write_text("years of work")
    cli(*arguments, tmp_path / "mine", code=2)
    assert (tmp_path / "mine").read_text() == "years of work"
    cli(*arguments, tmp_path / "no" / "such" / "directory", code=2)
    flip(path_of(writer, entry(writer, 3).parts[0].name))
    cli(*arguments, tmp_path / "out", code=1)
    assert "corrupt" in cli.err
    monkeypatch.setattr(export_command, "write_versions", interrupted)
    cli(*arguments, tmp_path / "out", code=130)
    monkeypatch.setattr(export_command, "write_versions", full_disk)
    cli(*arguments, tmp_path / "out", code=2)
    assert "No space left on device" in cli.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "stream"]


def test_raw_ids_are_exported_with_their_table(cli: Cli, tmp_path: Path) -> None:
    writer = make_owned(tmp_path / "s")
    found = cli.json("export", url_of(writer), "--out", tmp_path / "out")
    assert found["files"] == [f"{FQN}.weight.safetensors"]
    state = load_file(tmp_path / "out" / f"{FQN}.weight.safetensors")
    assert state.keys() == {f"{FQN}.weight", f"{FQN}.raw_ids"}
    assert torch.equal(state[f"{FQN}.raw_ids"], writer.owners)
    assert torch.equal(state[f"{FQN}.weight"], writer.table)


def test_other_buckets_in_a_delta_are_refused(cli: Cli, tmp_path: Path) -> None:
    writer = make_owned(tmp_path / "s")
    writer.identity = replace(IDENTITY, hash_size=999)
    writer.delta([1])
    cli("export", url_of(writer), "--out", tmp_path / "out", code=1)
    assert "other buckets of raw ids" in cli.err


def test_a_version_below_a_damaged_newest_entry_is_exported(cli: Cli, writer: Writer, tmp_path: Path) -> None:
    cli("export", url_of(writer), "--version", 3, "--out", tmp_path / "before")
    path_of(writer, entry_name(4)).write_text("{")
    cli("export", url_of(writer), "--version", 3, "--out", tmp_path / "after")
    (before,), (after,) = (list((tmp_path / each).glob("*.t.weight.*")) for each in ("before", "after"))
    assert before.read_bytes() == after.read_bytes()
    assert cli.json("diff", url_of(writer), 2, 3)["changed"]
    for options in ([], ["--version", 4]):
        cli("export", url_of(writer), *options, "--out", tmp_path / "newest", code=1)
        assert "copy the object back from a mirror" in cli.err
        assert "call Publisher.snapshot(): predictors continue from it" in cli.err
