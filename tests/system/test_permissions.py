"""Each role of a stream needs exactly the permissions that the guide lists."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker import (
    ModelDeltaTracker,
    Predictor,
    Publisher,
    Recovery,
    Retention,
    Rollout,
    Standby,
    Upkeep,
    restore,
)
from delta_tracker.errors import StorageError
from delta_tracker.stream import heartbeat
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.pin import announce_deletions
from delta_tracker.stream.pinning import pin_version, release_pin
from delta_tracker.stream.storage.storage import Storage
from tests.permissions import Permissions, documented, folder_of
from tests.servers import S3, s3_server
from tests.stores.wrapped import Operation, Perform, WrappedStorage

_PERMISSIONS = {
    "read": {"read", "read_range", "stat", "size"},
    "list": {"names", "objects"},
    "create": {"create", "put"},
    "replace": {"replace"},
    "delete": {"delete"},
}
_NEEDED = {kind: needed for needed, kinds in _PERMISSIONS.items() for kind in kinds}
_BEAT_SECONDS = 0.05
# What the runs below do not meet: a compaction that another one has overtaken deletes its parts, retention deletes
# what was not written for a day, a mirror reads what a request with an unknown outcome may have created, a publisher
# with states continues from a checkpoint as one without does, and a restore looks for newer parts of a lost entry.
_RARE = {
    "`compact`": {"delete": {"parts"}},
    "`mirror`, destination": {"read": {"merged"}},
    "`mirror --keep-versions`, destination": {
        "read": {"merged"},
        "create": {"merged"},
        "delete": {"merged", "predictors", "publishers"},
    },
    "publisher with `Upkeep(retention=, compact_every=)`": {"delete": {"predictors", "publishers"}},
    "publisher with `recovery=`": {"read": {"merged", "parts"}},
    "`restore`": {"list": {"parts"}},
    "standby": {"list": {"parts"}},
}


class Role:
    """Rule of a store that refuses what a role may not do, and records what it does.

    Args:
        allowed: folders or objects by permission; None to allow all.
    """

    def __init__(self, allowed: Permissions | None) -> None:
        self._allowed = allowed
        self.used: defaultdict[str, set[str]] = defaultdict(set)

    def __call__(self, operation: Operation, perform: Perform) -> Any:
        needed = _NEEDED.get(operation.kind)
        if needed is not None:
            folder = folder_of(operation.name)
            self.used[needed].add(folder)
            if self._allowed is not None and folder not in self._allowed.get(needed, ()):
                raise StorageError(operation.url, f"denied: {needed} {operation.name}")
        return perform(operation)


class Place:
    """Stores of a test, by name: with all permissions, and with those of a role."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._stores: dict[str, Storage] = {}

    def whole(self, name: str = "stream") -> Storage:
        """Return a store without limits."""
        return self._stores.setdefault(name, Storage("memory://"))

    def limited(self, name: str = "stream") -> Storage:
        """Return the same store with the permissions of the role."""
        return WrappedStorage(self.whole(name), self._role)


class BucketPlace(Place):
    """Stores in a bucket, whose server refuses what the role may not do."""

    def __init__(self, bucket: S3, key: str) -> None:
        self._bucket, self._key = bucket, key

    def whole(self, name: str = "stream") -> Storage:
        return Storage(f"{self._bucket.url}/{self._key}/{name}", options=self._bucket.options)

    def limited(self, name: str = "stream") -> Storage:
        keys = {"access_key_id": self._key, "secret_access_key": self._key}
        return Storage(f"{self._bucket.url}/{self._key}/{name}", options=self._bucket.options | keys)


def _model() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(100, 4))


class _Job:
    """A model with its optimizer and tracker."""

    def __init__(self) -> None:
        self.model = _model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.tracker = ModelDeltaTracker(self.model)
        self.recovery = Recovery(training_state={"optimizer": self.optimizer}, heartbeat_seconds=_BEAT_SECONDS)


class _Trainer(_Job):
    def __init__(self, url: Storage, *, is_recoverable: bool = False, **options: Any) -> None:
        super().__init__()
        recovery = self.recovery if is_recoverable else None
        self.publisher = Publisher(self.tracker, url, recovery=recovery, **options)
        self.publisher.snapshot()

    def publish(self, count: int) -> None:
        for _ in range(count):
            self.model(torch.tensor([[3]])).sum().backward()
            self.optimizer.step()
            self.tracker.step()
            self.publisher.publish()


def _published(place: Place, count: int = 3) -> _Trainer:
    trainer = _Trainer(place.whole())
    trainer.publish(count)
    return trainer


def _publisher(place: Place) -> None:
    trainer = _Trainer(place.limited())
    trainer.publish(3)
    trainer.publisher.close()


def _continued(place: Place) -> None:
    """Start a publisher from an older checkpoint, whose later versions it reads, also a merged snapshot."""
    trainer = _published(place, 9)
    state = trainer.tracker.state_dict()
    trainer.publish(1)
    trainer.publisher.close()
    compact(place.whole(), fold=0.01)
    continued = ModelDeltaTracker(_model())
    continued.load_state_dict(state)
    with Publisher(continued, place.limited()) as publisher:
        publisher.publish()


def _recoverable(place: Place) -> None:
    trainer = _Trainer(place.limited(), is_recoverable=True)
    for _ in range(3):
        time.sleep(2 * _BEAT_SECONDS)  # a call writes the heartbeat that is due
        trainer.publish(1)
    trainer.publisher.close()


def _restored(place: Place) -> None:
    trainer, job = _Trainer(place.whole(), is_recoverable=True), _Job()
    trainer.publish(9)
    compact(place.whole())
    restore(job.model, place.limited(), tracker=job.tracker, recovery=job.recovery)
    trainer.publisher.close()


def _standby(place: Place) -> None:
    trainer, job = _Trainer(place.whole(), is_recoverable=True), _Job()
    trainer.publish(9)
    compact(place.whole())
    standby = Standby(job.model, place.limited(), tracker=job.tracker, recovery=job.recovery)
    standby.sync()
    trainer.publish(1)
    trainer.publisher.close()
    taken = standby.follow(silence=5 * _BEAT_SECONDS)
    standby.close()
    assert taken is not None
    with Publisher(job.tracker, taken.recovery, recovery=job.recovery) as publisher:
        publisher.snapshot()


def _upkeep(place: Place) -> None:
    upkeep = Upkeep(retention=Retention(versions=2, grace_seconds=0.0), compact_every=4)
    trainer = _Trainer(place.limited(), upkeep=upkeep)
    for _ in range(9):
        trainer.publish(4)
        trainer.publisher.snapshot()
    trainer.publisher.close()


def _predictor(place: Place, **options: Any) -> None:
    trainer = _published(place)
    predictor = Predictor(_model(), place.limited(), **options)
    predictor.sync()
    trainer.publish(12)
    compact(place.whole())
    Predictor(_model(), place.limited()).sync()  # reads the merged version
    pin_version(place.whole(), 2)
    predictor.sync()
    predictor.follow()
    time.sleep(3 * _BEAT_SECONDS)
    predictor.stop()
    predictor.status()
    trainer.publisher.close()


def _named(place: Place) -> None:
    _predictor(place, name="p", rollout=Rollout(follows_pins=True))


def _operator(place: Place) -> None:
    trainer = _published(place, 9)
    compact(place.whole(), fold=0.01)
    announce_deletions(place.whole(), trainer.publisher.stream, 0)  # of a retention pass that runs
    pin_version(place.limited(), 10)
    trainer.publisher.snapshot()
    release_pin(place.limited())
    trainer.publisher.close()


def _mirror(place: Place, *, is_source: bool) -> None:
    trainer = _published(place)
    pin_version(place.whole(), 2)
    compact(place.whole())
    source, destination = place.whole(), place.whole("mirror")
    ends = (place.limited(), destination) if is_source else (source, place.limited("mirror"))
    ends[1].probe()  # as the command does
    for _ in range(2):
        Mirror(*ends).run(stop=threading.Event(), poll_seconds=0.01, once=True)
        trainer.publish(2)
    trainer.publisher.close()


def _keeping_mirror(place: Place) -> None:
    trainer = _published(place)
    mirror = Mirror(place.whole(), place.limited("mirror"), retention=Retention(versions=1, grace_seconds=0.0))
    for _ in range(3):
        trainer.publish(20)
        compact(place.whole(), fold=0.01)
        trainer.publisher.snapshot()
        mirror.run(stop=threading.Event(), poll_seconds=0.01, once=True)
    pin_version(place.whole(), trainer.publisher.version or 0)
    place.limited("mirror").probe()  # as the command does
    mirror.run(stop=threading.Event(), poll_seconds=0.01, once=True)
    trainer.publisher.close()


def _compact(place: Place) -> None:
    trainer = _published(place, 9)
    compact(place.limited())
    trainer.publisher.close()


_ROLES: dict[str, Callable[[Place], None]] = {
    "publisher": lambda place: (_publisher(place), _continued(place)),
    "publisher with `recovery=`": _recoverable,
    "publisher with `Upkeep(retention=, compact_every=)`": _upkeep,
    "`restore`": _restored,
    "standby": _standby,
    "predictor": _predictor,
    "predictor with a `name`": _named,
    "`rollback`, `release`": _operator,
    "`mirror`, source": lambda place: _mirror(place, is_source=True),
    "`mirror`, destination": lambda place: _mirror(place, is_source=False),
    "`mirror --keep-versions`, destination": _keeping_mirror,
    "`compact`": _compact,
}


@pytest.mark.parametrize("name", _ROLES)
def test_a_role_needs_exactly_the_permissions_of_the_guide(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", _BEAT_SECONDS)
    table = documented()
    assert list(table) == list(_ROLES)
    role = Role(table[name])
    _ROLES[name](Place(role))
    for needed, folders in _RARE.get(name, {}).items():
        role.used[needed] |= folders
    assert role.used == table[name]
    assert "denied" not in caplog.text


def _actions() -> dict[str, list[str]]:
    """Return what each role may do on the server, by its access key, according to the guide."""
    found: dict[str, list[str]] = {}
    for number, allowed in enumerate(documented().values()):
        actions = {"read": "Read", "list": "List", "create": "Write", "replace": "Write", "delete": "Write"}
        found[f"role{number}"] = sorted(
            f"{actions[needed]}:tests/role{number}/{stream}/{folder}*"
            for needed, folders in allowed.items()
            for folder in folders
            for stream in ("stream", "mirror")
        )
    return found


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3]:
    with s3_server(_actions()) as bucket:
        yield bucket


@pytest.mark.parametrize("name", _ROLES)
def test_a_bucket_with_the_permissions_of_a_role_is_enough(
    name: str, bucket: S3, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", _BEAT_SECONDS)
    _ROLES[name](BucketPlace(bucket, f"role{list(_ROLES).index(name)}"))
    assert "Denied" not in caplog.text


def test_a_stolen_credential_of_a_predictor_changes_nothing(bucket: S3) -> None:
    place = BucketPlace(bucket, f"role{list(_ROLES).index('predictor with a `name`')}")
    trainer = _published(place)
    stolen = place.limited()
    head = StreamLog(place.whole()).head()
    assert head is not None
    for write in (
        lambda: stolen.put(head.parts[0].name, [memoryview(b"x")]),
        lambda: stolen.create(entry_name(head.version + 1), b"{}"),
        lambda: stolen.replace("control/head.json", b"{}"),
        lambda: stolen.create("control/pins/00000000000000000001.json", b"{}"),
        lambda: stolen.delete(entry_name(head.version)),
        lambda: stolen.names("parts"),
    ):
        with pytest.raises(StorageError, match=r"lacked the necessary privileges|list request|Access Denied"):
            write()
    stolen.replace("predictors/other.json", b"{}")  # what the guide says that it can do
    trainer.publisher.close()
