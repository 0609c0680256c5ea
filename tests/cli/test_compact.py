"""``delta-tracker compact`` on real streams, also concurrent with a publisher."""

from __future__ import annotations

import pytest
import torch

from delta_tracker.cli import compact as compact_command
from delta_tracker.predictor.predictor import Predictor
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from tests.cli.commands import Cli, interrupted, url_of
from tests.stream.streams import FQN, Writer


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
