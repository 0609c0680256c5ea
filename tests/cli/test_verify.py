"""``delta-tracker verify`` on whole, damaged and changing streams."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from delta_tracker.cli import verify as verify_command
from delta_tracker.cli.entries import read_all
from delta_tracker.errors import LostEntryError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.stream.format import digests
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest, entry_name
from delta_tracker.stream.format.part_reader import PartReader
from delta_tracker.stream.format.state_tree import pack
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.pointer_writer import PointerWriter
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity, StateSpec, TableStates
from tests.cli.commands import IDENTITY, Cli, entry, flip, make_owned, path_of, url_of
from tests.stream.histories import History
from tests.stream.streams import FQN, Writer
from tests.sweeps import SWEEPS_ARE_WHOLE


def test_verify_accepts_an_intact_stream(cli: Cli, writer: Writer) -> None:
    compact(writer.storage)
    compact(writer.storage, fold=0.01)
    found = cli.json("verify", url_of(writer))
    assert found["ok"]
    assert (found["entries"], found["merged"], found["findings"]) == (5, 2, [])
    assert found["bytes"] == sum(path.stat().st_size for path in path_of(writer, "parts").iterdir())
    assert cli("verify", url_of(writer)).startswith("no damage found: 5 entries, 2 merged entries, ")


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
        (f"merged/{merged.name}", "it replaces another version"),
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
        ({"created": 1.0}, "its parent is"),  # as the next entry notices
        ({"stream": "0" * 32}, "it belongs to stream"),
        ({"snapshot": None}, "its newest snapshot is"),
        ({"generation": 0}, "its generation 0 is below 1"),
    ):
        path.write_text(json.dumps(fields | change))
        assert problem in cli("verify", url_of(writer), code=1)
    path.unlink()
    text = cli("verify", url_of(writer), code=1)
    assert "it is missing" in text
    assert "Next: copy the objects back from a mirror, or call Publisher.snapshot()" in text


def test_verify_skips_objects_that_retention_removes(cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.snapshot()

    def reader(storage: Storage, part, manifest: Manifest, **options) -> PartReader:
        if manifest.version in (1, 2):  # it goes upwards, each entry before its parts
            storage.delete(entry_name(manifest.version))
            storage.delete(part.name)
        return PartReader(storage, part, manifest, **options)

    monkeypatch.setattr(verify_command, "PartReader", reader)
    assert cli.json("verify", url_of(writer))["ok"]
    monkeypatch.undo()
    assert cli.json("verify", url_of(writer))["entries"] == 4  # versions 0, 3, 4 and 5


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
    assert "1 entry below a missing one: retention leaves only claims" in cli("inspect", url)
    report = cli.json("report", url)
    assert (report["faults"], report["versions"]["missing"]) == ([], 0)


def test_an_entry_without_parts_below_a_claim_and_a_merged_snapshot_is_no_damage(cli: Cli, writer: Writer) -> None:
    assert compact(writer.storage, fold=1e-9) is not None
    last = StreamLog(writer.storage).versions()[-1]
    writer.claim = StreamLog(writer.storage).claim()
    writer.delta([1])
    writer.delta([2])
    before = StreamLog(writer.storage).read(last)
    assert before is not None
    retain(writer.storage, Retention(versions=1, grace_seconds=0.0), now=lambda: time.time() + 1)
    assert [writer.storage.size(each.name) for each in before.parts] == [None]
    url = url_of(writer)
    for options in ([], ["--quick"]):
        assert cli.json("verify", url, *options)["findings"] == []
    assert cli.json("report", url)["faults"] == []


@pytest.mark.sweep("short")
@pytest.mark.parametrize("seed", range(100) if SWEEPS_ARE_WHOLE else (6, 26, 30))
def test_what_retention_leaves_can_be_mirrored_and_is_no_damage(cli: Cli, tmp_path: Path, seed: int) -> None:
    choose, source = random.Random(seed), Storage((tmp_path / "stream").as_uri(), create=True)
    history = History(source, seed)
    for number in range(20):
        step = choose.choice(["delta", "delta", "snapshot", "claim", "compact", "compact", "retain"])
        if step == "compact":
            compact(source, fold=choose.choice([1e9, 1e-9]))
        elif step == "retain":
            retain(source, Retention(versions=choose.randint(1, 3), grace_seconds=0), lambda: time.time() + 1)
            copy = Storage((tmp_path / f"copy{number}").as_uri(), create=True)
            Mirror(source, copy).run(stop=threading.Event(), poll_seconds=0.001, once=True)
            assert StreamLog(copy).head() == history.held.head
            for stream in (source, copy):
                assert cli.json("verify", str(stream.url))["findings"] == []
        else:
            getattr(history, step)()


@pytest.fixture
def states_writer(tmp_path: Path) -> Writer:
    """A stream of a claim, a snapshot and a delta of format 2: for each version a part, states and training states."""
    states = TableStates("EXACT_TEST", ((0, 3), (3, 4)), (StateSpec("sum", torch.float32, "range"),))
    writer = Writer(Storage((tmp_path / "states").as_uri(), create=True), states=states)
    writer.training = [pack({"a": torch.arange(30)}, "state"), pack({"b": 1.5}, "state")]
    writer.snapshot()
    writer.delta([1, 7])
    return writer


@pytest.mark.parametrize("reads_pieces", [False, True])
def test_verify_reads_every_byte_of_states_and_training_states(
    cli: Cli, states_writer: Writer, reads_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reads_pieces:
        monkeypatch.setattr(verify_command, "_MEMORY_BYTES", 0)
        monkeypatch.setattr(digests, "PIECE_BYTES", 64)
        states_writer.delta([3])
    url = url_of(states_writer)
    paths = sorted(path_of(states_writer, "parts").iterdir())
    assert len(paths) == (12 if reads_pieces else 8)
    if reads_pieces:
        paths = paths[8:]  # of the version with such pieces
    else:
        found = cli.json("verify", url)
        assert (found["ok"], found["parts"]) == (True, 8)
        assert found["bytes"] == sum(path.stat().st_size for path in paths)
    for path in paths:
        good = path.read_bytes()
        for at in {0, len(good) // 3, len(good) // 2, len(good) - 1}:
            flip(path, at)
            wheres = {each["where"] for each in json.loads(cli("verify", url, "--json", code=1))["findings"]}
            assert f"parts/{path.name}" in wheres, (path, at)
            path.write_bytes(good)


def test_verify_compares_the_sizes_of_all_objects(cli: Cli, states_writer: Writer) -> None:
    url = url_of(states_writer)
    assert cli.json("verify", url, "--quick")["ok"]
    version = entry(states_writer, 2)
    states, training = version.parts[0].states, version.training[1]
    assert states is not None
    path_of(states_writer, states.name).unlink()
    path_of(states_writer, training.name).write_bytes(b"short")
    expected = {states.name: "it does not exist", training.name: f"it has 5 bytes instead of {training.num_bytes}"}
    for arguments in ((), ("--quick",)):
        found = cli.json("verify", url, *arguments, code=1)["findings"]
        assert {each["where"]: each["problem"] for each in found} == expected


def test_verify_checks_states_without_their_part(cli: Cli, states_writer: Writer) -> None:
    part = entry(states_writer, 1).parts[0]
    assert part.states is not None
    flip(path_of(states_writer, part.name))
    flip(path_of(states_writer, part.states.name))
    found = cli.json("verify", url_of(states_writer), code=1)["findings"]
    assert [each["where"] for each in found] == [part.name, part.states.name]


def test_verify_finds_a_raw_id_with_two_rows_after_a_version(cli: Cli, tmp_path: Path) -> None:
    writer = make_owned(tmp_path / "s")
    assert cli.json("verify", url_of(writer))["ok"]
    writer.owners[7] = 100  # also owns row 5, which is in another version
    writer.delta([7])
    (found,) = cli.json("verify", url_of(writer), code=1)["findings"]
    assert found["where"] == entry_name(4)
    assert "the raw id 100 has two rows" in found["problem"]
    assert cli.json("verify", url_of(writer), "--quick")["ok"]
    writer.owners[5] = NO_OWNER
    writer.delta([5])
    writer.identity = replace(IDENTITY, hash_size=999)
    writer.delta([5])
    found = [each["where"] for each in cli.json("verify", url_of(writer), code=1)["findings"]]
    assert found == [entry_name(4), entry_name(6)]
    writer.snapshot()
    writer.delta([1])
    assert len(cli.json("verify", url_of(writer), code=1)["findings"]) == 2


def test_verify_takes_listed_owners_over_those_of_whole_blocks(cli: Cli, tmp_path: Path) -> None:
    writer = make_owned(tmp_path / "s")
    writer.owners[9] = 100  # in the whole block also at row 5
    whole = writer.rows(None)
    writer.owners[5] = NO_OWNER
    writer.write("snapshot", [writer.rows([5]), whole])
    assert cli.json("verify", url_of(writer))["ok"]


def _range(column: Tensor, begin: int, end: int) -> Tensor:
    return column[begin:end]


def test_raw_ids_with_two_rows_are_found_after_each_version() -> None:
    random, num_rows = torch.Generator().manual_seed(4), 40
    identity = Identity(1000, (Bucket((0, num_rows), None),))
    entry = Writer(Storage("memory://"), num_rows, identity=identity).snapshot()
    owners, held = verify_command._Owners(), torch.full((num_rows,), NO_OWNER)
    assert list(owners.problems(entry, is_whole=True)) == []
    num_found = 0
    for _ in range(200):
        ids = torch.randperm(num_rows, generator=random)[:4].sort().values
        new = torch.randint(0, 400, (4, 1), generator=random)
        new[0] = NO_OWNER
        held[ids] = new[:, 0]
        block = Block(FQN, (0, num_rows), (0, 4), 4, "list", Encoding.F32)
        owners.add(BlockRows(block, ids, partial(_range, new), (), partial(_range, new)))
        owned = held[held != NO_OWNER].tolist()
        twice = len(owned) > len(set(owned))
        problems = list(owners.problems(replace(entry, kind="delta"), is_whole=True))
        assert bool(problems) == twice
        assert all("has two rows" in each for each in problems)
        num_found += twice
    assert 5 < num_found < 195, num_found


def promoted(writer: Writer, tmp_path: Path) -> Storage:
    """A copy of a stream in which a new stream follows version 4."""
    copy = Storage((tmp_path / "copy").as_uri(), create=True)
    mirror = Mirror(writer.storage, copy)
    while mirror.step():
        pass
    mirror.copy_merged()
    promote(copy)
    return copy


def test_a_promotion_is_no_damage(cli: Cli, writer: Writer, tmp_path: Path) -> None:
    compact(writer.storage)
    copy = promoted(writer, tmp_path)
    found = cli.json("verify", copy.url)
    assert (found["findings"], found["entries"], found["merged"]) == ([], 5, 1)
    again = Writer(copy, num_rows=50)
    again.snapshot()
    again.delta([1])
    assert cli.json("verify", copy.url)["findings"] == []
    assert cli.json("verify", copy.url, "--quick")["findings"] == []
    retain(copy, Retention(versions=1, grace_seconds=0.0))
    assert cli.json("verify", copy.url)["findings"] == []


def test_an_entry_of_a_stream_that_was_not_forked_is_found(cli: Cli, writer: Writer, tmp_path: Path) -> None:
    copy = promoted(writer, tmp_path)
    Writer(copy, num_rows=50).snapshot()
    for version, expected in ((3, [3, 4]), (7, [7])):
        path = Path(copy.url.removeprefix("file://")) / entry_name(version)
        good = path.read_text()
        path.write_text(json.dumps(json.loads(good) | {"stream": "0" * 32}))
        found = cli.json("verify", copy.url, code=1)["findings"]
        assert sorted({each["where"] for each in found}) == [entry_name(each) for each in expected]
        assert f"it belongs to stream {'0' * 32}" in found[0]["problem"]
        path.write_text(good)


def test_entries_below_a_gap_are_checked(cli: Cli, writer: Writer) -> None:
    compact(writer.storage)
    flip(path_of(writer, entry(writer, 1).parts[0].name))
    path_of(writer, entry_name(3)).unlink()
    found = cli.json("verify", url_of(writer), code=1)
    assert [each["where"] for each in found["findings"]] == [entry(writer, 1).parts[0].name, entry_name(3)]
    assert found["findings"][1]["problem"] == "it is missing, and the newest snapshot is below it"
    assert all(each["is_in_the_way"] for each in found["findings"])
    assert found["entries"] == 4
    path_of(writer, entry_name(2)).unlink()
    found = cli.json("verify", url_of(writer), code=1)
    assert found["findings"][1]["where"] == entry_name(2)
    assert "it and the entries up to version 3 are missing" in found["findings"][1]["problem"]


def test_a_damaged_newest_entry_is_a_finding_among_others(cli: Cli, writer: Writer) -> None:
    flip(path_of(writer, entry(writer, 3).parts[0].name))
    path_of(writer, entry_name(4)).write_text("{")
    found = cli.json("verify", url_of(writer), code=1)
    wheres = [StreamLog(writer.storage).read(3).parts[0].name, entry_name(4)]  # type: ignore[union-attr]
    assert [each["where"] for each in found["findings"]] == wheres
    assert found["entries"] == 4
    assert "2 findings in 4 entries" in cli("verify", url_of(writer), code=1)
    for version in range(4):
        path_of(writer, entry_name(version)).write_text("{")
    found = cli.json("verify", url_of(writer), code=1)
    assert [each["where"] for each in found["findings"]] == [entry_name(version) for version in range(5)]


@pytest.mark.parametrize("version", [500, 10**20 - 1])
def test_verify_and_inspect_agree_on_a_stray_name(cli: Cli, writer: Writer, version: int) -> None:
    PointerWriter(writer.storage, seconds=0.0).after(entry(writer, 4))
    path_of(writer, entry_name(version)).write_text("{}")
    found = cli.json("verify", url_of(writer), code=1)["findings"]
    assert found[-1]["where"] == entry_name(version)
    assert entry_name(version) in cli("verify", url_of(writer), code=1)
    cli("inspect", url_of(writer), code=1)


def test_objects_that_retention_deleted_before_a_promotion_are_no_damage(
    cli: Cli, writer: Writer, tmp_path: Path
) -> None:
    copy = Storage((tmp_path / "copy").as_uri(), create=True)
    mirror = Mirror(writer.storage, copy)
    while mirror.step():
        pass
    again = Writer(writer.storage, num_rows=50)
    again.snapshot()
    while mirror.step():
        pass
    retain(copy, Retention(versions=1, grace_seconds=0.0))
    assert StreamLog(copy).versions() == [4, 5, 6], "version 4 without its objects"
    promote(copy)
    assert cli.json("verify", copy.url)["findings"] == []


def test_a_newest_snapshot_that_is_missing_is_found(cli: Cli, writer: Writer) -> None:
    snapshot = writer.claim.head.snapshot
    path_of(writer, entry_name(snapshot)).unlink()
    assert "the newest snapshot is missing: no reader can start" in cli("verify", url_of(writer), code=1)


def test_the_advice_about_a_newest_entry_that_was_deleted_works(cli: Cli, writer: Writer) -> None:
    lost = writer.delta([1])
    path_of(writer, entry_name(lost.version)).unlink()
    with pytest.raises(LostEntryError):
        writer.delta([2])
    found = cli("verify", url_of(writer), code=1)
    assert f"{entry_name(lost.version)}: it is missing, and the newest snapshot is below it" in found
    assert "call Publisher.snapshot(): predictors continue from it" in found
    writer.snapshot()
    assert cli("verify", url_of(writer)).startswith("no damage found")


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_entry_that_is_listed_but_missing_is_found(
    cli: Cli, writer: Writer, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(writer, entry_name(3))

    def after_the_listing(*arguments):
        if path.exists():
            if is_replaced:  # retention deletes it only then
                writer.snapshot()
            path.unlink()
        return read_all(*arguments)

    monkeypatch.setattr(verify_command, "read_all", after_the_listing)
    found = cli.json("verify", url_of(writer), code=0 if is_replaced else 1)["findings"]
    assert [each["where"] for each in found] == ([] if is_replaced else [entry_name(3)])
