"""Streams that a standby reads and claims. No function in this module is a collective."""

import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from delta_tracker.errors import (
    FencedError,
    InvalidArgumentError,
    LivePublisherError,
    MalformedError,
    StorageError,
    StreamReplacedError,
)
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.format.table_choice import check_has_all
from delta_tracker.stream.log import Claim, StreamLog
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Location, Storage, open_storage
from delta_tracker.stream.takeover_request import PublisherActivity, PublisherObserver, read_request

_logger = logging.getLogger(__name__)
GONE = "Check the url, mount or restore its store, and call again"
_ATTEMPTS = 100  # claims of a stream that may be lost to versions of the former publisher
_MIN_HEARTBEATS = 3  # a silence below this number of heartbeats is logged


class RecoveryStream:
    """Recovery stream of a standby. Rank 0 uses it to decide on a takeover and to claim the stream.

    A decision is a dict that rank 0 sends to all ranks. If the dict is empty, the ranks continue to follow the stream.
    If it contains the key ``is_due``, they take over. If it contains ``nothing``, ``gone`` or ``live``, they raise an
    error whose argument is the value of this key.
    """

    def __init__(self, log: StreamLog, name: str, look_seconds: float, recorder: Recorder, runtime: Runtime) -> None:
        self.shown: tuple[int | None, str | None] = None, None  # version and error of all ranks, for the heartbeat
        self._log = log
        self._observer = PublisherObserver(log.storage, name)
        self._recorder = recorder
        self._look_seconds = look_seconds
        self._monotonic = runtime.monotonic
        # The id of the claim is drawn before the claim, which is found again if the store's answer is lost.
        self._writer = secrets.token_hex(16)
        self._claimed: Manifest | None = None  # this job's claim
        self._next_look = 0.0
        self._seen: int | None = None  # newest snapshot that was seen; None before the first
        self._checked_silence: tuple[float, float] | None = None  # and time between heartbeats
        self._reason = ""  # why there was no takeover

    def decide_follow(self, silence: float | None, version: int | None) -> dict[str, Any]:
        """Return the decision for a poll of ``Standby.follow(silence)``. ``version`` is the last applied version."""
        if self._monotonic() < self._next_look:
            return {}
        self._next_look = self._monotonic() + self._look_seconds
        try:
            seen = self._observer.observe(*self.shown)
            known = self._known(None if seen is None else seen.head, version)
            if seen is None:
                if known is None:
                    return {"nothing": "the stream is empty"}
                self.log_once(f"standby waits: {StreamReplacedError(self._log.url, known).with_remedy(GONE)}")
                return {}
            request = read_request(self._log.storage, seen.head, seen.last)
        except (MalformedError, StorageError) as error:
            self.log_once(f"standby cannot look at the publisher: {error}")
            return {}
        if silence is not None:
            self._check_interval(silence, seen)
        if (shown := self.shown[0]) is not None:
            self._recorder.standby_version.set(shown)
        self._recorder.standby_lag_versions.set(seen.head.version - (-1 if shown is None else shown))
        is_silent = silence is not None and seen.silent_seconds > silence
        if request is None and not is_silent and not self._is_own(seen.head):
            return {}
        return self._due(seen.head, known, is_forced=request is not None and request.force, last=seen.last)

    def decide_takeover(self, version: int | None, *, force: bool, silence: float) -> dict[str, Any]:
        """Return the decision for ``Standby.take_over(force, silence)``. ``version`` is the last applied version."""
        seen = None if force else self._observer.observe(*self.shown)
        if seen is not None:
            self._check_interval(silence, seen)
        head = seen.head if seen is not None else self._log.head() if force else None
        known = self._known(head, version)
        if head is None:
            return {"nothing": "the stream is empty"} if known is None else {"gone": known}
        if seen is not None and seen.silent_seconds < silence and not self._is_own(head):
            return {"live": [head.generation, head.version, seen.silent_seconds]}
        return self._due(head, known, is_forced=force, last=None if seen is None else seen.last)

    def claim(self, decision: Mapping[str, Any]) -> Claim:
        """Claim the stream after the entry in ``decision``. In a forced takeover, claim it after the newest entry.

        Raises LivePublisherError if the publisher is alive or another job has already taken over.
        """
        self._log.storage.probe()
        if decision["last"] is not None:  # to catch up may have taken minutes
            seen = self._observer.observe(*self.shown)
            if seen is not None and seen.last > decision["last"]:
                raise LivePublisherError(self._log.url, seen.head.generation, seen.head.version, seen.silent_seconds)
        if self._claimed is not None:
            head = self._log.head()
            if head is None or head.link != self._claimed.link:  # another publisher continued it
                self._writer, self._claimed = secrets.token_hex(16), None
        after = Link(*decision["after"])
        if not decision["is_forced"]:
            claim = self._log.claim(after=after, writer=self._writer)
        else:
            claim = _claim_newest(self._log, self._writer, lambda: self._forced_head(decision, after))
        self._claimed = claim.head
        return claim

    def log_once(self, reason: str) -> None:
        """Log the reason why this job does not take over, unless it is the same ``reason`` as in the previous call."""
        if reason != self._reason:
            _logger.warning("%s", reason)
        self._reason = reason

    def _known(self, head: Manifest | None, version: int | None) -> int | None:
        """Record ``head.snapshot``. Return ``version``, or if it is None, the last recorded snapshot."""
        if head is not None and head.snapshot is not None:
            self._seen = head.snapshot
        return self._seen if version is None else version

    def _due(self, head: Manifest, known: int | None, *, is_forced: bool, last: float | None) -> dict[str, Any]:
        """Return the decision to take over. If the stream has no version, return the decision to raise an error.

        ``last`` is the time of the publisher's last version or heartbeat.
        """
        if head.snapshot is None:
            return {"nothing": "the stream has only a claim"} if known is None else {"gone": known}
        return {
            "is_due": True,
            "after": [head.version, head.xxh3],
            "generation": head.generation,
            "is_forced": bool(is_forced),
            "is_own": self._is_own(head),
            "last": None if is_forced or self._is_own(head) else last,  # of a publisher that must stay silent
        }

    def _is_own(self, head: Manifest) -> bool:
        return head.kind == "claim" and head.writer == self._writer

    def _check_interval(self, silence: float, seen: PublisherActivity) -> None:
        seconds = seen.heartbeat_seconds
        if seconds is None or self._checked_silence == (silence, seconds):
            return
        if silence < seconds:
            least = _MIN_HEARTBEATS * seconds
            remedy = f"Pass at least {least:g}: the publisher leaves a heartbeat every {seconds:g} s"
            raise InvalidArgumentError("silence", silence, remedy)
        if silence < _MIN_HEARTBEATS * seconds:
            _logger.warning("a live publisher may look dead: silence=%g heartbeat_seconds=%g", silence, seconds)
        self._checked_silence = silence, seconds

    def _forced_head(self, decision: Mapping[str, Any], after: Link) -> Manifest:
        head = self._log.head()
        if head is None:
            raise StreamReplacedError(self._log.url, after.version).with_remedy(GONE)
        if head.generation != decision["generation"] and not self._is_own(head):
            raise LivePublisherError(self._log.url, head.generation, head.version)
        return head


class ServingStreams:
    """Serving streams of a trainer. A standby checks these streams on all ranks, and claims them on rank 0."""

    def __init__(self, recovery: StreamLog, urls: Sequence[Location]) -> None:
        if isinstance(urls, str | os.PathLike | Storage) or not isinstance(urls, Sequence):
            raise InvalidArgumentError("serving", urls, "Pass a list of urls")
        self._recovery = recovery
        self._urls = urls
        self.storages = [open_storage(each) for each in urls]  # a wrong url must not create a directory
        self._streams: list[str] = []  # ids of the streams, from check()
        self.is_checked = False  # True after check() has succeeded
        # The ids of the claims are drawn before the claims, which are found again if the store's answer is lost.
        self._writers = [secrets.token_hex(16) for _ in urls]
        self._check_distinct([recovery.storage.url, *(each.url for each in self.storages)])

    def check(self, version: Manifest | None) -> None:
        """Check that the streams exist, and that they are the serving streams of the trainer.

        ``version``, a version of the recovery stream, lists the other consumers of the trainer's tracker, and their
        streams if known. Raises InvalidArgumentError if a listed stream was not passed, or if there are more unlisted
        streams than consumers with an unknown stream. If ``version`` is None, the consumers are not compared.
        """
        storages = [open_storage(each) for each in self._urls]  # the directory may have been mounted meanwhile
        streams = [_stream_of(each) for each in storages]
        head = version or self._recovery.head()
        self._check_distinct([*([] if head is None else [head.stream]), *streams])
        if version is not None and version.training:
            saved = TrainingStates(self._recovery.storage, version).consumers(0).values()
            known = {each.place.get("stream") for each in saved if each.place is not None}
            others = [number for number, stream in enumerate(streams) if stream not in known]
            if len(others) > sum(each.place is None for each in saved):
                number = others[0]
                remedy = (
                    f"Pass the streams that the trainer publishes: this is stream {streams[number]}, and version "
                    f"{version.version} of {self._recovery.storage.url} belongs to {sorted(map(str, known)) or 'none'}"
                )
                raise InvalidArgumentError("serving", storages[number].url, remedy)
            if left_out := sorted(str(stream) for stream in known - set(streams)):
                remedy = f"Pass the urls of all streams that the trainer publishes, also those of {left_out}"
                raise InvalidArgumentError("serving", [each.url for each in storages], remedy)
        self.storages, self._streams, self.is_checked = storages, streams, True

    def claim(self, number: int, recovery: Manifest) -> Claim:
        """Claim the serving stream with the index ``number``.

        ``recovery`` is this job's claim of the recovery stream. Raises FencedError if another job has claimed the
        recovery stream since then.
        """
        storage = self.storages[number]
        storage.probe()
        log = StreamLog(storage)
        return _claim_newest(log, self._writers[number], lambda: self._newest(log, number, recovery))

    def _newest(self, log: StreamLog, number: int, recovery: Manifest) -> Manifest:
        head = log.head()
        if head is None or head.stream != self._streams[number]:
            remedy = f"Mount or restore the stream {self._streams[number]}, which was replaced"
            raise InvalidArgumentError("serving", log.url, remedy)
        owner = self._recovery.head()
        if owner is None or owner.link != recovery.link:
            owner = owner or recovery
            raise FencedError(recovery.generation, owner.generation, owner.version)
        return head

    def _check_distinct(self, names: Sequence[str]) -> None:
        if len(set(names)) < len(names):
            remedy = f"Pass each stream once, without the recovery stream {self._recovery.url}"
            raise InvalidArgumentError("serving", [each.url for each in self.storages], remedy)


def _claim_newest(log: StreamLog, writer: str, newest: Callable[[], Manifest]) -> Claim:
    """Claim a stream after the entry ``newest()``. Retry if the former publisher commits a version in between."""
    for _ in range(_ATTEMPTS):
        head = newest()
        try:
            return log.claim(after=head.link, writer=writer)
        except LivePublisherError:
            continue  # the former publisher has committed a version
    raise StorageError(log.url, f"lost {_ATTEMPTS} claims to versions of the former publisher")


def _stream_of(storage: Storage) -> str:
    head = StreamLog(storage).head() if storage.has_directory("log") else None
    if head is None:
        remedy = "Check the url, and that its directory is mounted: there is no stream"
        raise InvalidArgumentError("serving", storage.url, remedy)
    check_has_all(storage)
    return head.stream
