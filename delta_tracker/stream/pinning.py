"""Functions that write pins and releases, with which an operator pins all predictors to a version or releases them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MalformedError,
    MissingVersionError,
    NoSnapshotError,
    PinError,
    UnsupportedStoreError,
)
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.object_reader import MEMORY_BYTES, check_size, source_of
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pin import (
    MAX_PIN_BYTES,
    MAX_REASON,
    PINS,
    Pin,
    free_counters,
    newest_pin,
    pin_name,
    running_deletions,
)
from delta_tracker.stream.reading.path import path_to
from delta_tracker.stream.storage.storage import Storage

_FAULTS = (CorruptPartError, MalformedError, MissingVersionError, NoSnapshotError, PinError)


def pin_version(
    storage: Storage, version: int, *, reason: str = "", replaces: bool = False, is_quick: bool = False
) -> Pin:
    """Make all predictors that follow pins return to ``version`` and stay at it until a release. Return the pin.

    Checks the entries that lead to the version and the sizes of their objects, before and after the pin is written.
    Unless ``is_quick``, first verifies all bytes of the parts too. Retention keeps these objects while the pin applies.

    ``reason`` is a text of at most 1,000 characters for operators. ``replaces=True`` replaces a current pin.

    Raises:
        InvalidArgumentError: if the version is not in the stream, is a claim or belongs to a former stream of the log.
        MissingVersionError, NoSnapshotError, MalformedError, CorruptPartError: if an entry or an object that leads to
            the version is missing or damaged.
        PinError: if the stream is pinned and ``replaces`` is False, if another operator wrote a pin or a release in the
            meantime, or if a running or interrupted retention pass may delete versions that lead to ``version``. If the
            pin was already written, it is undone.
        UnsupportedStoreError: if the store is at an http url.
        StorageError: if the store fails. The pin may have been written.
    """
    log = _log(storage, "a rollback", reason)
    _former(log, replaces=replaces)  # refuse before the parts are read
    _refuse_former(log, version)
    checked_path(log, version, reads_parts=not is_quick)
    counters, former = free_counters(storage), _former(log, replaces=replaces)
    entry, _ = checked_path(log, version)
    head = log.head() or entry
    bad = max(head.version, 0 if former is None else former.bad)
    pin = _create(storage, _order("pin", entry, bad, reason), counters)
    try:
        # A retention pass that has not seen the pin has announced its deletions before. If it ended before the listing
        # of announcements, it has deleted everything before the check of the path.
        written = storage.stat(pin_name(pin.counter))
        running = running_deletions(storage, now=time.time() if written is None else written.modified)
        _, oldest = checked_path(log, version)
        before = max((each.before for each in running if each.stream == pin.stream), default=-1)
        if before > oldest:
            reason = f"a retention pass deletes versions below {before}, or was interrupted in the last hour"
            step = (
                "Pin again when no pass runs (one hour after an interrupted one), or a version from a newer snapshot on"
            )
            raise PinError(storage.url, "pinned", reason, step)
    except _FAULTS:
        _correct(log, pin, former)
        raise
    return pin


def release_pin(storage: Storage, *, reason: str = "") -> Pin:
    """Make predictors at the pinned version continue from the newest snapshot of the log. Return the release.

    The snapshot must be newer than all versions that existed when the pin was written. Merged snapshots do not count.
    ``reason`` is a text of at most 1,000 characters for operators.

    Raises:
        PinError: if the stream is not pinned, the log has no such snapshot yet, or another operator wrote a pin or a
            release in the meantime.
        CorruptPartError: if an object of the snapshot is missing, or has another size.
        UnsupportedStoreError: if the store is at an http url.
        StorageError: if the store fails. The release may have been written.
    """
    log = _log(storage, "a release", reason)
    counters, pin = free_counters(storage), _former(log, replaces=True)
    if pin is None:
        raise PinError(storage.url, "released", "it is not pinned", "Predictors apply new versions: do nothing")
    snapshot = _snapshot(log, log.head())
    if snapshot is None or snapshot.version <= pin.bad:
        reason = f"it has no snapshot above version {pin.bad}, from which predictors could continue"
        step = "Call publisher.snapshot() in the repaired trainer, or wait for its next snapshot, then release again"
        raise PinError(storage.url, "released", reason, step)
    _check_objects(storage, snapshot)
    return _create(storage, _order("release", snapshot, pin.bad, reason), counters)


def _former(log: StreamLog, *, replaces: bool) -> Pin | None:
    """Return the pin that applies, or None. Raise PinError if a pin applies and ``replaces`` is False."""
    pin, head = newest_pin(log.storage), log.head()
    if pin is None or head is None or pin.kind != "pin" or pin.stream != head.stream:
        return None
    if not replaces:
        reason = f"it is already pinned to version {pin.version}, counter {pin.counter}"
        step = "Call delta-tracker release first, or replace the pin with --replace"
        raise PinError(log.storage.url, "pinned", reason, step)
    return pin


def checked_path(log: StreamLog, version: int, *, reads_parts: bool = False) -> tuple[Manifest, int]:
    """Check the objects of the versions that lead to ``version``. Return its entry and the oldest of these versions.

    Compares only the sizes, unless ``reads_parts`` is True. Raises the errors of :func:`pin_version`.
    """
    path = path_to(log, version)
    entry = log.read(version)  # the path may end with a merged snapshot instead
    if entry is None or path[-1].link != entry.link:
        raise MissingVersionError(version, (log.head() or path[-1]).version)
    if entry.kind == "claim":
        text = "Pass the version before or after: this one is a claim without rows"
        raise InvalidArgumentError("version", version, text)
    for each in path:
        _check_objects(log.storage, each)
        for part in each.parts if reads_parts else ():
            source_of(log.storage, part, MEMORY_BYTES, None).finish()
    return entry, min(each.version for each in path)


def _refuse_former(log: StreamLog, version: int) -> None:
    """Refuse a version of a former stream of the log, to which predictors of the current stream cannot return."""
    head = log.head()
    entry = log.read(version) if head is not None and type(version) is int and 0 <= version <= head.version else None
    if head is not None and entry is not None and entry.stream != head.stream:
        step = "Call Publisher.snapshot() first, because the present stream has no snapshot"
        if head.snapshot is not None:
            step = f"Pass a version of the present stream, whose newest snapshot is version {head.snapshot}"
        remedy = f"{step}: version {version} belongs to the former stream {entry.stream}"
        raise InvalidArgumentError("version", version, remedy)


def _check_objects(storage: Storage, manifest: Manifest) -> None:
    for each in manifest.objects:
        check_size(each, storage.size(each.name), storage)


def _snapshot(log: StreamLog, head: Manifest | None) -> Manifest | None:
    """Return the newest snapshot of the log if it belongs to the stream of ``head``, otherwise None."""
    if head is None or head.snapshot is None:
        return None
    snapshot = log.read(head.snapshot)
    return snapshot if snapshot is not None and snapshot.stream == head.stream else None


def _log(storage: Storage, operation: str, reason: str) -> StreamLog:
    if storage.is_read_only:
        raise UnsupportedStoreError(storage.url, operation)
    if len(reason) > MAX_REASON:
        raise InvalidArgumentError("reason", reason, f"Pass a text of at most {MAX_REASON:,} characters")
    return StreamLog(storage)


def _order(kind: Literal["pin", "release"], entry: Manifest, bad: int, reason: str) -> Pin:
    return Pin(
        counter=0,
        stream=entry.stream,
        kind=kind,
        version=entry.version,
        xxh3=entry.xxh3,
        bad=bad,
        reason=reason,
        time=time.time(),
    )


def _create(storage: Storage, order: Pin, counters: Sequence[int]) -> Pin:
    for counter in counters:
        order = replace(order, counter=counter)
        data = order.to_json()
        if not storage.create(pin_name(counter), data):
            # The response of an earlier attempt may have been lost.
            there = storage.read(pin_name(counter), max_bytes=MAX_PIN_BYTES)
            if there is None or there.tobytes() != data:
                reason = f"another pin or release was written at the same time, with the counter {counter}"
                step = "Look at it with delta-tracker fleet, then repeat the command if it is still wanted"
                raise PinError(storage.url, "pinned" if order.kind == "pin" else "released", reason, step)
    storage.sync(PINS)
    return order


def _correct(log: StreamLog, pin: Pin, former: Pin | None) -> None:
    """Undo a pin whose version cannot be reached: write ``former`` or a release again, unless a newer order exists."""
    snapshot = _snapshot(log, log.head())
    reason = f"version {pin.version} cannot be reached"
    if former is not None:
        correction = replace(former, bad=pin.bad, reason=reason, time=time.time())
    elif snapshot is not None:
        correction = _order("release", snapshot, max(0, snapshot.version - 1), reason)
    else:
        return
    correction = replace(correction, counter=pin.counter + 1)
    log.storage.create(pin_name(correction.counter), correction.to_json())
