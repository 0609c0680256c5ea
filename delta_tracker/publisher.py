"""Publisher: writes a tracker's changed rows to a stream, one version at a time."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import FencedError, InvalidArgumentError, PublishError
from delta_tracker.stream.codec import Rows, encode
from delta_tracker.stream.log import Claim, StreamLog
from delta_tracker.stream.manifest import Block, Kind, Manifest, part_from_json, part_to_json
from delta_tracker.stream.ranks import DEFAULT_TIMEOUT, Ranks
from delta_tracker.stream.storage import Storage, open_storage
from delta_tracker.tracker import ModelDeltaTracker
from delta_tracker.types import Delta, ShardSpec


class Publisher:
    """Publishes what changed since its last version, from all ranks, as one version.

    Every rank builds one, and every rank calls :meth:`publish` and :meth:`snapshot` at the same batch. Each rank
    writes its own rows; ranks exchange a few hundred bytes, never rows. The version exists once rank 0 has created its
    manifest. Until then nothing is visible and every row stays pending, whatever fails.

    Building one claims the stream: a publisher of an older generation is fenced from then on. What the stream holds
    of this trainer is unknown at that moment, so the first version of a publisher is a snapshot.

    Args:
        tracker: whose rows.
        url: the stream, ``file:///directory``, ``s3://bucket/prefix``, ... or an opened
            :class:`~delta_tracker.stream.storage.Storage`; the same on every rank.
        consumer: the tracker's consumer that this publisher reads as; may be left out when there is only one.
        timeout: how long ranks wait for each other.

    Raises:
        UnknownConsumerError: if the tracker has no such consumer.
        InvalidArgumentError: for a url that names no store.
        StorageError: if this rank cannot use the store.
        PublishError: if another rank cannot.
    """

    def __init__(
        self,
        tracker: ModelDeltaTracker,
        url: str | Storage,
        consumer: str | None = None,
        *,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self._tracker = tracker
        self._consumer = tracker.resolve_consumer(consumer)
        self._ranks = Ranks(timeout)
        self._claim: Claim | None = None
        self._has_snapshot = False
        self._is_open = True
        self._storage: Storage = self._together(lambda: open_storage(url, create=True))
        self._head = self._from_rank_0(self._take_stream)

    @property
    def generation(self) -> int:
        """This publisher's generation."""
        return self._head.generation

    @property
    def stream(self) -> str:
        """Id of the stream, 32 hex digits."""
        return self._head.stream

    @property
    def version(self) -> int:
        """The newest version that this publisher has committed, its claim to begin with."""
        return self._head.version

    def publish(self) -> Manifest:
        """Publish the rows that changed since the last version; all rows if this publisher has published none yet.

        A version without changed rows is published too: it tells predictors how fresh they are. Rows whose update is
        under way are in this version and again in the next.

        Returns:
            The committed manifest, the same on every rank.

        Raises:
            FencedError: if a newer publisher has the stream, on every rank; nothing was published.
            PublishError: if another rank failed; nothing was published.
            StorageError: if this rank could not write; nothing was published.
        """
        return self._publish("delta")

    def snapshot(self) -> Manifest:
        """Publish every row of every table, as they are now.

        Returns, raises: as :meth:`publish`.
        """
        return self._publish("snapshot")

    def close(self) -> None:
        """Leave the ranks' group; every rank calls it. The stream stays claimed, and the tracker attached."""
        if self._is_open:
            self._ranks.close()
        self._is_open = False

    def _publish(self, kind: Kind) -> Manifest:
        if not self._is_open:
            raise InvalidArgumentError("publisher", "closed", "Build a new Publisher")
        kind = self._agree("snapshot" if not self._has_snapshot else kind)
        delta = self._tracker.get_delta(self._consumer, commit=False, with_values=kind == "delta")
        try:
            parts = self._exchange(lambda: self._write_part(delta, kind))
            draft = Manifest(
                stream=self._head.stream,
                generation=self._head.generation,
                writer=self._head.writer,
                version=self._head.version + 1,
                kind=kind,
                batches=delta.batches,
                created=time.time(),
                tables=dict(self._tracker.tables),
                parts=tuple(part_from_json(part["part"]) for part in parts if "part" in part),
            )
            self._head = self._from_rank_0(lambda: self._commit(draft))
        except BaseException:
            self._tracker.abort(delta)
            raise
        self._tracker.commit(delta)
        self._has_snapshot = True
        return self._head

    def _agree(self, kind: Kind) -> Kind:
        """Rank 0's kind, once all ranks are seen to stand at the same batch."""
        orders = self._exchange(lambda: {"kind": kind, "batch": self._tracker.num_batches})
        for rank, order in enumerate(orders):
            if order["batch"] != orders[0]["batch"]:
                reason = f"a cut at batch {order['batch']} while rank 0 cuts at batch {orders[0]['batch']}"
                raise PublishError(rank, reason)
        agreed: Kind = orders[0]["kind"]
        return agreed

    def _write_part(self, delta: Delta, kind: Kind) -> dict[str, Any]:
        """Write this rank's rows; their record, or nothing where there are none."""
        rows = [
            block
            for fqn, shard in self._tracker.shards.items()
            for block in (self._whole_blocks(fqn, shard) if kind == "snapshot" else _delta_blocks(delta, fqn, shard))
        ]
        if not rows:
            return {}
        unique = f"{self._head.version + 1:020d}-g{self._head.generation}-r{self._ranks.rank}-{secrets.token_hex(8)}"
        part, buffers = encode(rows, f"parts/{unique}.safetensors")
        self._storage.put(part.name, buffers)
        return {"part": part_to_json(part)}

    def _whole_blocks(self, fqn: str, shard: ShardSpec) -> list[Rows]:
        rows = (shard.row_offset, shard.row_offset + shard.num_rows)
        return [
            Rows(Block(fqn, rows, columns, shard.num_rows, whole=True), None, view)
            for columns, view in zip(shard.columns, self._tracker.column_views(fqn), strict=True)
            if shard.num_rows
        ]

    def _take_stream(self) -> Manifest:
        self._claim = StreamLog(self._storage).claim()
        return self._claim.head

    def _commit(self, draft: Manifest) -> Manifest:
        assert self._claim is not None, "only rank 0 commits"
        return self._claim.commit(draft)

    def _from_rank_0(self, action: Callable[[], Manifest]) -> Manifest:
        """The manifest that rank 0 gets from ``action``, on every rank; or its error, on every rank."""
        answers = self._exchange(lambda: {"entry": action().to_json().decode()} if self._ranks.rank == 0 else {})
        return Manifest.from_json("entry of rank 0", answers[0]["entry"].encode())

    def _together(self, action: Callable[[], Storage]) -> Storage:
        """The result of ``action`` once it has succeeded on every rank."""
        results: list[Storage] = []

        def vote() -> dict[str, Any]:
            results.append(action())
            return {}

        self._exchange(vote)
        return results[0]

    def _exchange(self, action: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Each rank's message from ``action``. A rank that fails says so to the others before it raises."""
        failure: Exception | None = None
        try:
            message = action()
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it; raised below
            failure, message = error, {"error": f"{type(error).__name__}: {error}"}
            if isinstance(error, FencedError):
                message["fenced"] = [error.generation, error.owner, error.version]
        messages = self._ranks.exchange(message)
        if failure is not None:
            raise failure
        for rank, each in enumerate(messages):
            if "fenced" in each:
                raise FencedError(*each["fenced"])
            if "error" in each:
                raise PublishError(rank, each["error"])
        return messages


def _delta_blocks(delta: Delta, fqn: str, shard: ShardSpec) -> list[Rows]:
    """A table's changed rows, one block for each column range of this rank."""
    changed = delta[fqn]
    assert changed.values is not None, "the publisher reads values"
    if len(changed) == 0:
        return []
    rows = (shard.row_offset, shard.row_offset + shard.num_rows)
    widths = [stop - start for start, stop in shard.columns]
    pieces: tuple[Tensor, ...] = torch.split(changed.values, widths, dim=1)
    return [
        Rows(Block(fqn, rows, columns, len(changed), whole=False), changed.global_ids, piece)
        for columns, piece in zip(shard.columns, pieces, strict=True)
    ]
