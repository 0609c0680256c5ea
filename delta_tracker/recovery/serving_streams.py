"""Serving streams that a trainer publishes next to its recovery stream: :class:`ServingStreams`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from delta_tracker.errors import FencedError, InvalidArgumentError
from delta_tracker.recovery.recovery_stream import claim_newest
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import Claim, StreamLog
from delta_tracker.stream.storage.storage import Location, Storage, open_storage


class ServingStreams:
    """Serving streams of a trainer, as its standby sees them on one rank. Makes no collective call."""

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
        """Check that the streams exist, that the trainer publishes them, and that it publishes no others.

        ``version``, of the recovery stream, has the positions of the streams of the tracker's other consumers. A stream
        that is not among them is accepted only for a consumer whose position is unknown. None of them may be left out,
        because its former publisher would not be fenced.
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
        """Claim a stream, unless another job has claimed the recovery stream after ``recovery``.

        The order of the reads keeps a job that was suspended from fencing the job that has taken over from it: that job
        claims the recovery stream first. If its claim of the serving stream is not the head yet, it comes later.
        """
        storage = self.storages[number]
        storage.probe()
        log = StreamLog(storage)
        return claim_newest(log, self._writers[number], lambda: self._newest(log, number, recovery))

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


def _stream_of(storage: Storage) -> str:
    """Return the id of the stream in a store."""
    head = StreamLog(storage).head() if storage.has_directory("log") else None
    if head is None:
        remedy = "Check the url, and that its directory is mounted: there is no stream"
        raise InvalidArgumentError("serving", storage.url, remedy)
    return head.stream
