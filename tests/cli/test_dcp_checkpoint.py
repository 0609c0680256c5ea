"""``delta-tracker export --dcp``: TorchRec loads the checkpoint, and a new stream starts from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from delta_tracker.cli import dcp_checkpoint
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.mirroring import promote
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableStates
from tests.cli.commands import Cli, entry, flip, full_disk, interrupted, make, make_owned, path_of, url_of
from tests.ranks import RankPool
from tests.recovery.restore_cases import same
from tests.recovery.test_restore import cells, load, spec
from tests.stream.streams import FQN, Writer
from tests.sweeps import SWEEPS_ARE_WHOLE

_CASES = "tests.cli.dcp_checkpoint_cases"
_PUBLISHED = "tests.recovery.restore_cases:published"
_EXTRA = [
    {"name": "copied", "rows": 7, "sharding": "data"},
    {"name": "plain", "rows": 8, "sharding": "row", "kernel": "dense"},
]


def _keys(path: Path) -> list[str]:
    return sorted(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


@pytest.mark.sweep("short")
@pytest.mark.parametrize("optimizer", ["RowWiseAdagrad", "SGD", *(["Adagrad"] if SWEEPS_ARE_WHOLE else [])])
def test_torchrec_loads_what_a_trainer_published(
    cli: Cli, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    two_ranks.run(_PUBLISHED, path=str(tmp_path), spec=spec(2, *_EXTRA, optimizer=optimizer))
    found = cli.json("export", tmp_path / "stream", "--dcp", tmp_path / "dcp")
    assert found["files"] == [".metadata", "__0_0.distcp"]
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "dcp").iterdir())
    assert [each for each in tmp_path.iterdir() if each.name.startswith(".")] == []
    keys = _keys(tmp_path / "dcp")
    assert any(key.startswith("optimizer.") for key in keys) == (optimizer != "SGD")
    saved = load(tmp_path, "saved", 2)
    for pool in (two_ranks,) if optimizer == "SGD" else (one_rank, two_ranks):
        world_size = pool.world_size
        made = spec(world_size, *_EXTRA, optimizer=optimizer, is_moved=world_size == 1)
        names = pool.run(f"{_CASES}:loaded", path=str(tmp_path), spec=made)[0]
        assert [key.removeprefix("model.") for key in keys if key.startswith("model.")] == names
        ranks = load(tmp_path, "loaded", world_size)
        for held in ranks:
            assert same(held["dense"], saved[0]["dense"])
            for name in ("optimizer", "scheduler"):
                assert same(held["states"][name], saved[0]["states"][name])
        assert same(_without_numbers(cells(ranks)), _without_numbers(cells(saved)))


def _without_numbers(found: dict) -> dict:
    """Return rows and states, without the numbers of the kernels, which TorchRec's checkpoints do not have."""
    return {name: cell for name, cell in found.items() if isinstance(cell, list)}


def test_a_stream_starts_from_a_checkpoint(cli: Cli, two_ranks: RankPool, tmp_path: Path) -> None:
    made = spec(2)
    two_ranks.run(_PUBLISHED, path=str(tmp_path), spec=made)
    cli("export", tmp_path / "stream", "--version", 2, "--dcp", tmp_path / "dcp")
    assert two_ranks.run(f"{_CASES}:seeded", path=str(tmp_path), spec=made) == [["snapshot", "delta"]] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.INT8])
def test_a_version_without_states_has_the_model_only(cli: Cli, tmp_path: Path, encoding: Encoding) -> None:
    writer = make(tmp_path / "s", encoding=encoding)
    for version in (1, 3, 4):
        out = tmp_path / f"out{version}"
        cli("export", url_of(writer), "--version", version, "--out", out)
        cli("export", url_of(writer), "--version", version, "--dcp", tmp_path / f"{version}")
        expected = load_file(out / f"{FQN}.weight.safetensors") | load_file(out / "dense.safetensors")
        assert _keys(tmp_path / f"{version}") == sorted(f"model.{name}" for name in expected)
        state = {"model": {name: torch.full_like(tensor, -1) for name, tensor in expected.items()}}
        dcp.load(state, checkpoint_id=tmp_path / f"{version}", no_dist=True)
        assert same(state["model"], expected)


def test_a_checkpoint_is_there_whole_or_not_at_all(
    cli: Cli, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("years of work")
    cli("export", url_of(writer), "--dcp", tmp_path / "mine", code=2)
    assert "--dcp" in cli.err
    assert (tmp_path / "mine").read_text() == "years of work"
    cli("export", url_of(writer), "--dcp", tmp_path / "dcp", "--out", tmp_path / "out", code=2)
    assert "--dcp has its own path and format" in cli.err
    cli("export", url_of(writer), code=2)
    assert "Pass --out or --dcp" in cli.err
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", interrupted)
        cli("export", url_of(writer), "--dcp", tmp_path / "dcp", code=130)
        patch.setattr(dcp, "save", full_disk)
        patch.setattr(dcp_checkpoint, "write_versions", full_disk)
        cli("export", url_of(writer), "--dcp", tmp_path / "dcp", code=2)
        assert "No space left on device" in cli.err
    flip(path_of(writer, entry(writer, 3).parts[0].name))
    cli("export", url_of(writer), "--dcp", tmp_path / "dcp", code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "stream"]


def test_what_a_checkpoint_cannot_have_is_refused(cli: Cli, tmp_path: Path) -> None:
    cli("export", url_of(make_owned(tmp_path / "owned")), "--dcp", tmp_path / "dcp", code=2)
    assert "the table has raw ids" in cli.err
    states = TableStates("LARS_SGD", ((0, 4),), (StateSpec("momentum1", torch.float32, "columns"),))
    writer = Writer(Storage((tmp_path / "lars").as_uri(), create=True), states=states)
    writer.training = [b"never read"]
    writer.snapshot()
    cli("export", url_of(writer), "--dcp", tmp_path / "dcp", code=2)
    assert f"its states of {FQN!r} are not known" in cli.err
    promote(writer.storage)
    cli("export", url_of(writer), "--version", 1, "--dcp", tmp_path / "dcp", code=2)
    assert "Choose --out, or a version of the present stream" in cli.err
