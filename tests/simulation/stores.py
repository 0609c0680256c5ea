"""Stores of a world: directories that fail, vanish, and lose or damage objects, by changes of the file system only."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from delta_tracker import Storage
from delta_tracker.stream.storage.store import Store as ObjectStore
from tests.simulation.bucket import Bucket, Pace
from tests.simulation.roles import LimitedStore, Roles
from tests.simulation.served import Choice
from tests.simulation.threads import EPOCH, SCHEDULER

_FOLDERS = ("log", "parts", "merged", "control", "drafts", "probe")
_AWAY = ".away"
_ENTRIES = "[0-9]*.json"
_P, _T = ParamSpec("_P"), TypeVar("_T")
_ENTRY_DAMAGES = ("missing", "page", "empty", "cut", "folder")
_DAMAGES = (*_ENTRY_DAMAGES, "flipped")


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a log, or a merged entry, whose objects are there.

    Args:
        stream: id of the stream.
        first: first version that it covers.
        version: last version that it covers.
        kind: ``claim``, ``snapshot`` or ``delta``.
        is_merged: True for a merged entry.
        created: time in seconds, by the clock of its publisher.
        committed: time in seconds, by the clock of the store.
        digest: hash of the bytes of the entry.
    """

    stream: str
    first: int
    version: int
    kind: str
    is_merged: bool
    created: float
    committed: float
    digest: str


def _alone(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator of a method that looks at or changes the files at once: no other thread runs meanwhile."""

    @functools.wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with SCHEDULER.alone():
            return method(*args, **kwargs)

    return call


@dataclass
class Store:
    """Directory with a stream.

    Attributes:
        is_failing: True while every request fails.
        is_unmounted: True while the directory is missing.
        is_lost: True if it fails for ever.
        is_former: True after the promotion of a mirror of it.
        has_lost_parts: True if some parts are damaged for ever.
        is_bucket: True if trainers and predictors access it as an object store.
        pace: speed of its responses to predictors.
        roles: permissions of the actors, None if each may do anything.
        choice: tables of which it is a mirror; it is never promoted unless these are all.
    """

    path: Path
    is_failing: bool = False
    is_unmounted: bool = False
    is_lost: bool = False
    is_former: bool = False
    has_lost_parts: bool = False
    is_bucket: bool = False
    pace: Pace = field(default_factory=Pace)
    roles: Roles | None = None
    choice: Choice = field(default_factory=Choice)
    _pointer: bytes = b""  # before it was forged
    _wrong: bytes = b""
    _damaged: list[tuple[Path, Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path.mkdir()

    @property
    def url(self) -> str:
        return self.path.as_uri()

    def opened(self, *roles: str) -> str | Storage:
        """Return what trainers get as the url, with the permissions of roles."""
        return Storage(self.limited(Pace(), *roles)) if self.is_bucket else self.url

    def opened_by_predictor(self, *roles: str) -> str | Storage:
        """Return what predictors get as the url, which may answer slowly."""
        return Storage(self.limited(self.pace, *roles)) if self.is_bucket else self.url

    def limited(self, pace: Pace, *roles: str) -> ObjectStore:
        """Return the objects with the permissions of roles."""
        bucket = Bucket(self.path, pace)
        return bucket if self.roles is None else LimitedStore(bucket, self.roles, *roles)

    @property
    def is_healthy(self) -> bool:
        return not (self.is_failing or self.is_unmounted or self._damaged)

    @_alone
    def fail(self) -> None:
        """Let every request fail: each folder becomes a link to itself."""
        if self.is_failing or self.is_unmounted:
            return
        self.is_failing = True
        for name in _FOLDERS:
            _block(self.path / name)

    @_alone
    def unmount(self) -> None:
        """Remove the directory, as if its volume were not mounted."""
        if not self.is_failing and not self.is_unmounted:
            self.path.rename(self.path.with_name(self.path.name + _AWAY))
            self.is_unmounted = True

    @_alone
    def damage(self, choice: int) -> None:
        """Damage an object, except the two newest entries. Damage of a part may last for ever."""
        if self.is_failing or self.is_unmounted:
            return
        entries = sorted((self.path / "log").glob(_ENTRIES))[:-2]
        others = [path for name in ("merged", "parts") for path in sorted((self.path / name).glob("*"))]
        files = [path for path in (*entries, *others) if path.is_file()]
        if not files:
            return
        choice, how = divmod(choice, len(_DAMAGES))
        if choice % 2:
            files = files[-3:]  # a predictor may need them next
        choice, place = divmod(choice // 2, len(files))
        self._damage(files[place], _DAMAGES[how], choice)

    @_alone
    def damage_entry(self, choice: int) -> str | None:
        """Damage one of the newest entries, except the last two, and return its name; None if there is none."""
        paths = [] if self.is_failing or self.is_unmounted else sorted((self.path / "log").glob(_ENTRIES))[-7:-2]
        paths = [path for path in paths if path.is_file()]
        if not paths:
            return None
        choice, place = divmod(choice, len(paths))
        self._damage(paths[place], _ENTRY_DAMAGES[choice % len(_ENTRY_DAMAGES)], choice)
        return paths[place].name

    def _damage(self, path: Path, how: str, choice: int) -> None:
        is_part = path.parent.name == "parts"
        if how == "flipped" and (not is_part or not path.stat().st_size):  # such as one that was emptied before
            return
        kept = self.path / f"kept-{len(self._damaged)}"
        path.rename(kept)
        if is_part and how != "flipped" and choice % 3 == 0:
            self.has_lost_parts = True
        else:
            self._damaged.append((path, kept))
        data = kept.read_bytes()
        if how == "folder":
            path.mkdir()
        elif how == "flipped":
            at = choice % len(data)
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif how != "missing":
            path.write_bytes({"page": b"<html><body>Please log in</body></html>", "empty": b"", "cut": data[:-7]}[how])

    @_alone
    def forge(self, choice: int) -> bool:
        """Replace the pointer by one of which fields are too high, or by a page. Return False if there is none.

        The next write of a publisher replaces it, or a repair.
        """
        path = self.path / "control" / "head.json"
        if self.is_unmounted or not path.is_file():
            return False
        if path.read_bytes() != self._wrong:
            self._pointer = path.read_bytes()
        self._forge(path, choice)
        self._wrong = path.read_bytes()
        return True

    @contextmanager
    def forged_pin(self, stream: str, version: int, kind: str) -> Iterator[None]:
        """Context manager for an order that names an entry with another hash."""
        counter = len(self.orders()) + 1
        path = self.path / "control" / "pins" / f"{counter:020d}.json"
        bad = version if kind == "pin" else max(0, version - 1)
        fields = {"counter": counter, "stream": stream, "kind": kind, "version": version, "bad": bad}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**fields, "xxh3": "0" * 32, "reason": "", "time": SCHEDULER.now}))
        try:
            yield
        finally:
            path.unlink()

    def _forge(self, path: Path, choice: int) -> None:
        if choice % 4 == 3:
            path.write_bytes(b"<html><body>Please log in</body></html>")
            return
        fields = json.loads(self._pointer)
        if "version" in fields:
            version = 2**62 if choice % 4 == 2 else fields["version"] + 5
            fields |= {"version": version, "oldest": fields["oldest"] if choice % 4 == 0 else version}
            path.write_bytes(json.dumps(fields).encode())

    @_alone
    def pointed(self) -> int | None:
        """Return the version that the pointer names, None without a valid pointer."""
        try:
            found: int = json.loads((self.path / "control" / "head.json").read_bytes())["version"]
        except (OSError, ValueError):
            return None
        return found

    @_alone
    def repair(self) -> None:
        """End all faults, except a loss."""
        self.pace.set(0.0)
        if self.is_lost:
            return
        if self.is_unmounted:
            self.path.with_name(self.path.name + _AWAY).rename(self.path)
            self.is_unmounted = False
        if self.is_failing:
            for name in _FOLDERS:
                _unblock(self.path / name)
            self.is_failing = False
        pointer = self.path / "control" / "head.json"
        if self._wrong and pointer.is_file() and pointer.read_bytes() == self._wrong:
            pointer.write_bytes(self._pointer)
        for path, kept in reversed(self._damaged):
            if path.is_dir():
                path.rmdir()
            kept.replace(path)
        self._damaged.clear()

    @_alone
    def lose(self) -> None:
        self.repair()
        self.fail()
        self.is_lost = True

    @_alone
    def clear(self) -> None:
        """Delete everything."""
        for path in list(self.path.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    @_alone
    def renew(self) -> None:
        """Replace the volume by an empty one without faults."""
        self.is_lost = False
        self.repair()
        self.clear()
        self.is_former = self.has_lost_parts = False

    @_alone
    def copy_to(self, path: Path) -> None:
        """Copy all files to a directory, whose former files are deleted."""
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.path, path)

    @_alone
    def return_from(self, path: Path) -> None:
        """Replace all files by those of a copy."""
        self.clear()
        shutil.copytree(path, self.path, dirs_exist_ok=True)

    @_alone
    def date(self) -> None:
        """Date the files that the system has dated at the world's time."""
        if self.is_unmounted:
            return
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = os.path.join(folder, name)  # noqa: PTH118  called often
                with suppress(FileNotFoundError):  # the draft of a pointer, which a thread writes meanwhile
                    if os.lstat(path).st_mtime < EPOCH:  # a time of the system
                        os.utime(path, (SCHEDULER.now, SCHEDULER.now), follow_symlinks=False)

    @_alone
    def touch(self) -> None:
        """Date the newest entry now: retention takes the newest time of an object for the time of the store."""
        path = max((self.path / "log").glob(_ENTRIES), default=None)
        if path is not None:
            os.utime(path, (SCHEDULER.now, SCHEDULER.now))

    @property
    def is_partial(self) -> bool:
        """True for a mirror of some tables."""
        return self.choice.patterns is not None

    @_alone
    def entries(self, choice: Choice | None = None) -> list[Entry]:
        """Return the entries whose objects of some tables, by default of its own, are there, by their versions."""
        return [each for each in self._entries(choice or self.choice) if each is not None]

    @_alone
    def newest(self) -> Entry | None:
        """Return the newest entry of the log, also if its objects are not there; None if there is none."""
        path = max((self.path / "log").glob(_ENTRIES), default=None)
        return None if path is None else _described(path, is_merged=False)

    @_alone
    def listed(self) -> list[Entry]:
        """Return all entries of the log and merged ones, also if their objects are not there."""
        paths = [
            (path, folder == "merged") for folder in ("log", "merged") for path in (self.path / folder).glob(_ENTRIES)
        ]
        return [_described(path, is_merged=is_merged) for path, is_merged in paths]

    @_alone
    def has_log(self) -> bool:
        return any((self.path / "log").glob(_ENTRIES))

    def _entries(self, choice: Choice) -> Iterator[Entry | None]:
        for folder in ("log", "merged"):
            for path in sorted((self.path / folder).glob(_ENTRIES)):
                yield self._entry(path, choice, is_merged=folder == "merged")

    def _entry(self, entry: Path, choice: Choice, *, is_merged: bool = False) -> Entry | None:
        for part in filter(choice.takes_part, json.loads(entry.read_bytes())["parts"]):
            path = self.path / part["name"]
            if not path.is_file() or path.stat().st_size != part["num_bytes"]:
                return None
        return _described(entry, is_merged=is_merged)

    @_alone
    def garbage(self, *, is_pinned: bool) -> list[str]:
        """Return the objects that no entry names, and the entries that nobody needs.

        Needed are those from the newest snapshot on, claims, and what is before them. A pin keeps all later entries.
        """
        paths = sorted((self.path / "log").glob(_ENTRIES))
        entries = {int(path.stem): json.loads(path.read_bytes()) for path in paths}
        merged = [json.loads(path.read_bytes()) for path in (self.path / "merged").glob(_ENTRIES)]
        start = max((number for number, each in entries.items() if each["kind"] == "snapshot"), default=0)
        claims = {number for number, each in entries.items() if each["kind"] == "claim"}
        needed = {number for number in entries if number >= start - 1} | claims | {number - 1 for number in claims}
        named = set(_names_of((*entries.values(), *merged)))
        parts = [f"parts/{path.name}" for path in (self.path / "parts").glob("*")]
        folders = ("drafts", "probe", "predictors", "publishers", "control/retention")
        left = [f"{name}/{path.name}" for name in folders for path in (self.path / name).glob("*")]
        old = [f"log/{number}" for number in entries if number not in needed and not is_pinned]
        return [*left, *old, *(name for name in parts if name not in named)]

    @_alone
    def is_whole(self) -> bool:
        """Return True if the newest entry has its objects, or some parts are damaged for ever."""
        newest = max((self.path / "log").glob(_ENTRIES), default=None)
        return self.has_lost_parts or newest is None or self._entry(newest, self.choice) is not None

    @_alone
    def names(self) -> set[str]:
        """Return the names of all files, except drafts."""
        paths = (path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
        return {str(path) for path in paths if path.parts[0] not in ("drafts", "probe")}

    @_alone
    def unchosen(self) -> list[str]:
        """Return the parts that a mirror of its tables leaves out, but which are there."""
        paths = [path for folder in ("log", "merged") for path in (self.path / folder).glob(_ENTRIES) if path.is_file()]
        parts = [part for path in paths for part in json.loads(path.read_bytes())["parts"]]
        chosen = {part["name"] for part in parts if self.choice.takes_part(part)}
        others = {part["name"] for part in parts} - chosen
        return sorted(name for name in others if (self.path / name).exists())

    @_alone
    def following(self, version: int) -> list[Entry]:
        """Return the entries of the log after a version, up to the first one that is missing."""
        found: list[Entry] = []
        while (path := self.path / "log" / f"{version + 1 + len(found):020d}.json").is_file():
            found.append(_described(path, is_merged=False))
        return found

    @_alone
    def digests(self) -> dict[int, str]:
        """Return the hash of each entry of the log by its version, except of those that were damaged here."""
        if self.is_failing or self.is_unmounted:
            return {}
        damaged = {path for path, _ in self._damaged}
        paths = [path for path in sorted((self.path / "log").glob(_ENTRIES)) if path not in damaged]
        return {int(path.stem): _digest(path.read_bytes()) for path in paths}

    @_alone
    def has_entry(self, stream: str, version: int) -> bool:
        """Return True if the log has the entry of a version."""
        path = self.path / "log" / f"{version:020d}.json"
        return path.is_file() and json.loads(path.read_bytes())["stream"] == stream

    @_alone
    def orders(self) -> list[dict[str, Any]]:
        """Return the pins and releases, the oldest first."""
        return [json.loads(path.read_bytes()) for path in sorted((self.path / "control" / "pins").glob(_ENTRIES))]


def _names_of(entries: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the names of the objects of entries: parts, states of their rows, and training states."""
    for entry in entries:
        objects = [*entry["parts"], *(part.get("states") or {} for part in entry["parts"]), *entry.get("training", ())]
        yield from (each["name"] for each in objects if each)


def _described(path: Path, *, is_merged: bool) -> Entry:
    data = path.read_bytes()
    fields = json.loads(data)
    parent, version = fields["parent"], fields["version"]
    first = version if not is_merged else 0 if parent is None else parent["version"] + 1
    committed = path.stat().st_mtime
    return Entry(
        fields["stream"], first, version, fields["kind"], is_merged, fields["created"], committed, _digest(data)
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _block(folder: Path) -> None:
    """Replace a folder by a link to itself. The thread that writes a pointer may create the folder meanwhile."""
    away = folder.with_name(folder.name + _AWAY)
    while not folder.is_symlink():
        if away.exists():
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.exists():
            folder.rename(away)
        with suppress(FileExistsError):
            folder.symlink_to(folder.name)


def _unblock(folder: Path) -> None:
    """Put a folder back that :func:`_block` has replaced."""
    away = folder.with_name(folder.name + _AWAY)
    folder.unlink()
    while away.exists():
        try:
            away.rename(folder)
        except OSError:  # that thread has created it
            shutil.rmtree(folder, ignore_errors=True)
