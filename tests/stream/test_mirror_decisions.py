"""What a mirror does next, for all small logs of a source and heads of a destination, against a slow reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import xxhash

from delta_tracker.errors import MalformedError, MirrorDivergedError, MissingVersionError, StorageError
from delta_tracker.stream.format.manifest import Kind, Link, Manifest, entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Storage

_KINDS = ("delta", "claim", "altered", "foreign", "missing")
_NUM_VARIED = 3  # entries above the snapshot, each of one of the kinds
_STREAM, _OTHER, _WRITER = "1" * 32, "2" * 32, "3" * 32


def _entry(version: int, kind: Kind, stream: str, generation: int, parent: Link | None) -> bytes:
    entry = Manifest(
        stream=stream,
        generation=generation,
        writer=_WRITER,
        version=version,
        kind=kind,
        parent=parent,
        snapshot=None if version < 1 else 1,
        created=0.0,
    )
    return entry.to_json()


def _log(kinds: Sequence[str]) -> list[bytes | None]:
    """Return the entries of a log: a claim, a snapshot, and entries of these kinds. A missing entry is None.

    An altered entry is malformed, and the log continues after its bytes.
    """
    found: list[bytes | None] = []
    generation, parent = 1, None
    for version, kind in enumerate(("claim", "snapshot", *kinds)):
        generation += kind == "claim" and version > 0
        match kind:
            case "altered":
                data = b"{" + str(version).encode()
            case "foreign":
                data = _entry(version, "delta", _OTHER, generation, parent)
            case "missing":
                data = b""  # only its hash counts
            case _:
                data = _entry(version, kind, _STREAM, generation, parent)  # type: ignore[arg-type]
        parent = Link(version, xxhash.xxh3_128_hexdigest(data))
        found.append(None if kind == "missing" else data)
    return found


def _is_followed(kind_of: dict[int, str], version: int) -> str:
    """Return whether an entry can be copied by what follows it: copy, fail, or rest if nothing shows it yet."""
    following = kind_of.get(version + 1, "missing")
    if following == "altered":
        return _is_followed(kind_of, version + 1)
    return {"missing": "rest", "foreign": "fail"}.get(following, "copy")


def _expected(kinds: Sequence[str], head: int, *, is_checked: bool) -> str:
    """Return what a mirror does whose destination ends at ``head``: copy, rest or fail."""
    kind_of = dict(enumerate(("claim", "snapshot", *kinds)))
    present = [version for version, kind in kind_of.items() if kind != "missing"]
    match kind_of.get(head + 1, "missing"):
        case "missing":
            return "fail" if max(present) > head and is_checked else "rest"
        case "foreign":
            return "fail"
        case "altered":
            return _is_followed(kind_of, head + 1)
        case "claim" if max(present) > head + 1:
            return _is_followed(kind_of, head + 1) if head + 2 in present else "fail"
    return "copy"


def _cases() -> Iterator[tuple[tuple[str, ...], int]]:
    for kinds in itertools.product(_KINDS, repeat=_NUM_VARIED):
        for head in range(1, _NUM_VARIED + 1):
            if not {"foreign", "missing"} & {*kinds[: head - 1]}:
                yield kinds, head


def _put(storage: Storage, log: Sequence[bytes | None], versions: range) -> None:
    for version in versions:
        if (data := log[version]) is not None:
            assert storage.create(entry_name(version), data)


def _outcome(mirror: Mirror) -> str:
    try:
        return "copy" if mirror.step() else "rest"
    except (MirrorDivergedError, MalformedError, MissingVersionError, StorageError):
        return "fail"


@pytest.mark.parametrize("state", ["restarted", "running", "due"])
def test_a_mirror_copies_what_follows_and_nothing_else(state: str) -> None:
    cases, now = list(_cases()), [0.0]
    for kinds, head in cases:
        log = _log(kinds)
        source, destination = Storage("memory://"), Storage("memory://")
        _put(source, log, range(head + 1))
        _put(destination, log, range(1, head + 1))
        mirror = Mirror(source, destination, runtime=Runtime(monotonic=lambda: now[0]))
        if state != "restarted":
            assert _outcome(mirror) == "rest", (kinds, head)
        _put(source, log, range(head + 1, len(log)))
        now[0] += 60.0 if state == "due" else 1.0
        expected = _expected(kinds, head, is_checked=state != "running")
        assert _outcome(mirror) == expected, (kinds, head)
        top = head + (expected == "copy")
        assert StreamLog(destination).versions() == [*range(1, top + 1)], (kinds, head)
        copied = destination.read(entry_name(top), max_bytes=1 << 20)
        assert copied is not None
        assert copied.tobytes() == log[top]
    assert len(cases) == 245
