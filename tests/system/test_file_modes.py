"""Each role of a stream in a directory runs as a Unix user with the groups and modes that the guide lists."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Retention, Rollout, Storage, Upkeep
from delta_tracker.cli.commands import commands
from delta_tracker.errors import StorageError
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.pinning import pin_version, release_pin
from tests import forked
from tests.documents import GUIDE
from tests.heartbeats import read_heartbeats

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")

_IDS = {"trainer": 61001, "server": 61002, "operator": 61003, "copier": 61004, "stranger": 61005}
_GROUPS = {"trainer": 61001, "readers": 61010, "heartbeats": 61011, "operators": 61012}
_DAY = 86_400
_COMMANDS = ("fleet", "inspect", "verify")
# Folders that a role must not write, with an object of each.
_OBJECTS = {
    "log": "log/00000000000000000099.json",
    "parts": "parts/00000000000000000099-g9-r0-0123456789abcdef.safetensors",
    "merged": "merged/00000000000000000003-00000000000000000001-delta.json",
    "control": "control/head.json",
    "takeover": "control/takeover.json",
    "pins": "control/pins/00000000000000000099.json",
    "predictors": "predictors/other.json",
}


@pytest.fixture
def stream() -> Iterator[Path]:
    """A directory with the owners, groups and modes of the guide, in which the trainer has published 4 versions."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        if any(not path.stat().st_mode & 0o001 for path in Path(folder).parents):
            pytest.skip(f"other users cannot reach {folder}; set TMPDIR to a directory that they can")
        commands = re.findall(
            r"^install -d -o (\w+) -g (\w+) -m (\d+) /data/(\S+)$",
            (GUIDE / "operate.md").read_text(),
            flags=re.MULTILINE,
        )
        assert len(commands) == 5
        for owner, group, mode, name in commands:
            path = Path(folder) / name
            path.mkdir()
            os.chown(path, _IDS[owner], _GROUPS[group])
            path.chmod(int(mode, 8))
        _as("trainer", _publish, str(Path(folder) / "stream"), 3)
        yield Path(folder) / "stream"


# Processes of other users


class _RefusedError(Exception):
    pass


def _as(user: str, task: Callable[..., Any], *arguments: Any, groups: tuple[str, ...] = ()) -> Any:
    """Call a function in a process of a user; return its result. Raise _RefusedError for a StorageError there."""
    ours, theirs = Pipe()
    process = forked.start(_become, theirs, _IDS[user], [_GROUPS[each] for each in groups], task, arguments)
    theirs.close()
    try:
        result, refused = ours.recv()
    finally:
        process.join(60)
    assert process.exitcode == 0
    if refused is not None:
        raise _RefusedError(refused)
    return result


def _become(
    pipe: Connection, user: int, groups: list[int], task: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    # The first calls import modules, which may be in a folder of root's.
    warm = Storage("memory://")
    _publish(warm, 9)
    compact(warm)
    Predictor(_model(), warm).sync()
    for name in _COMMANDS:
        CliRunner().invoke(commands, [name, "--help"])
    os.umask(0o022)
    os.setgroups(groups)
    os.setgid(user)
    os.setuid(user)
    try:
        pipe.send((task(*arguments), None))
    except StorageError as error:
        pipe.send((None, str(error)))


_as_reader = partial(_as, "server", groups=("readers",))
_as_named = partial(_as, "server", groups=("readers", "heartbeats"))
_as_operator = partial(_as, "operator", groups=("readers", "operators"))


# What the roles do


def _model() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(100, 4))


def _publish(url: str | Storage, count: int, upkeep: Upkeep | None = None, num_snapshots: int = 1) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ModelDeltaTracker(model) as tracker, Publisher(tracker, url, upkeep=upkeep) as publisher:
        for _ in range(num_snapshots):
            publisher.snapshot()
            for _ in range(count):
                model(torch.tensor([[3]])).sum().backward()
                optimizer.step()
                tracker.step()
                publisher.publish()


def _keep_up(url: str) -> None:
    _publish(url, 4, Upkeep(retention=Retention(versions=2, grace_seconds=0.0), compact_every=4), num_snapshots=9)


def _follow(url: str, version: int, name: str | None) -> int:
    predictor = Predictor(_model(), url, name=name, rollout=Rollout(follows_pins=True))
    predictor.follow(poll_seconds=0.02)
    found = predictor.wait(version, timeout=60)
    predictor.stop()
    predictor.status()
    return found


def _sync(url: str) -> int:
    return Predictor(_model(), url, rollout=Rollout(follows_pins=True)).sync()


def _codes(url: str) -> list[int]:
    return [CliRunner().invoke(commands, [name, url]).exit_code for name in _COMMANDS]


def _names(url: str) -> list[str]:
    return [each.name for each in read_heartbeats(Storage(url))]


def _refused(url: str) -> list[str]:
    """Try to write an object of each folder, and to delete an entry and a draft of the trainer; return what fails."""
    storage, failed = Storage(url), []
    writes: dict[str, Callable[[], Any]] = {
        folder: partial(storage.replace, name, b"{}") for folder, name in _OBJECTS.items()
    }
    writes |= {f"delete from {each}": partial(storage.delete, storage.names(each)[0]) for each in ("log", "parts")}
    for folder, write in writes.items():
        try:
            write()
        except StorageError as error:
            failed += [folder] if "Permission denied" in str(error) else [str(error)]
    return failed


def _pin(url: str, version: int) -> None:
    pin_version(Storage(url), version)


def _release(url: str) -> None:
    release_pin(Storage(url))


def _compact(url: str) -> int:
    merged = compact(Storage(url))
    assert merged is not None
    return merged.version


def _mirror(source: str, destination: str) -> None:
    Mirror(Storage(source), Storage(destination, create=True)).run(stop=threading.Event(), poll_seconds=0.01, once=True)


def _leave_draft(url: str) -> None:
    Path(url, "drafts", "0123456789abcdef").write_bytes(b"")


def _replace_heartbeat(url: str, name: str) -> None:
    Storage(url).replace(f"predictors/{name}.json", b"{}")


_DELETES = ["delete from log", "delete from parts"]


def test_a_predictor_with_read_access_follows_and_writes_nothing(stream: Path) -> None:
    url = str(stream)
    assert _as_reader(_follow, url, 4, None) == 4
    _as("trainer", _publish, url, 12)
    assert _as("trainer", _compact, url) == 18
    assert _as_reader(_follow, url, 18, "p") == 18
    assert _as_reader(_names, url) == []
    assert _as_reader(_codes, url) == [0, 0, 0]
    assert _as_reader(_refused, url) == [*_OBJECTS, *_DELETES]
    assert not list((stream / "drafts").iterdir())


def test_a_predictor_with_a_name_writes_its_heartbeat_only(stream: Path) -> None:
    url = str(stream)
    assert _as_named(_follow, url, 4, "p") == 4
    assert _as_reader(_names, url) == ["p"]
    assert _as_named(_refused, url) == [*(each for each in _OBJECTS if each != "predictors"), *_DELETES]
    with pytest.raises(_RefusedError, match=r"predictors/p\.json"):  # of another user
        _as("copier", _replace_heartbeat, url, "p", groups=("readers", "heartbeats"))
    _as_named(_replace_heartbeat, url, "p")


def test_an_operator_writes_pins_only(stream: Path) -> None:
    url = str(stream)
    _as_operator(_pin, url, 2)
    assert _as_reader(_sync, url) == 2
    _as("trainer", _publish, url, 1)
    _as_operator(_release, url)
    assert _as_reader(_sync, url) == 7
    assert _as_operator(_refused, url) == [*(each for each in _OBJECTS if each != "pins"), *_DELETES]
    with pytest.raises(_RefusedError, match=r"control/pins/0+3\.json"):
        _as_reader(_pin, url, 6)


def test_a_publisher_with_upkeep_deletes_what_other_users_left(stream: Path) -> None:
    url = str(stream)
    _as_named(_follow, url, 4, "p")
    _as_named(_leave_draft, url)
    left = [stream / "predictors" / "p.json", stream / "drafts" / "0123456789abcdef"]
    for path in left:
        os.utime(path, (time.time() - 2 * _DAY,) * 2)
    _as("trainer", _keep_up, url)
    assert [path.name for path in left if path.exists()] == []
    assert not (stream / "log" / f"{1:020d}.json").exists()
    head = max((stream / "log").iterdir())
    assert _as_reader(_sync, url) == int(head.stem)


def test_a_mirror_reads_its_source_only(stream: Path) -> None:
    copy = stream.parent / "copy"
    copy.mkdir()
    os.chown(copy, _IDS["copier"], _GROUPS["readers"])
    copy.chmod(0o750)
    _as("trainer", _publish, str(stream), 12)
    _as("trainer", _compact, str(stream))
    for _ in range(2):
        _as("copier", _mirror, str(stream), str(copy), groups=("readers",))
        _as("trainer", _publish, str(stream), 1)
    assert _as_reader(_sync, str(copy)) == 21


def test_a_user_without_the_group_is_told_the_path(stream: Path) -> None:
    copy = stream.parent / "copy"
    copy.mkdir()
    os.chown(copy, _IDS["stranger"], _GROUPS["trainer"])
    for task, arguments in ((_sync, ()), (_publish, (1,)), (_pin, (2,)), (_mirror, (str(copy),))):
        with pytest.raises(_RefusedError, match=rf"Permission denied: '{stream}/"):
            _as("stranger", task, str(stream), *arguments)


@pytest.mark.parametrize("folder", ["log", "parts", "merged", "control", "control/pins"])
def test_a_folder_that_cannot_be_read_is_named(stream: Path, folder: str) -> None:
    _as_operator(_pin, str(stream), 2)
    (stream / folder).mkdir(exist_ok=True)
    (stream / folder).chmod(0o700)
    with pytest.raises(_RefusedError, match=rf"Permission denied: '{stream}/{folder}"):
        _as_reader(_sync, str(stream))


def test_a_file_that_cannot_be_read_is_named(stream: Path) -> None:
    for part in (stream / "parts").iterdir():
        part.chmod(0o600)
    with pytest.raises(_RefusedError, match=rf"Permission denied: '{stream}/parts/.*\.safetensors'"):
        _as_reader(_sync, str(stream))
