"""Publisher: writes a tracker's changed rows to a stream, one version at a time."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from delta_tracker.errors import FencedError, InvalidArgumentError, PublishError
from delta_tracker.selection import TopK
from delta_tracker.stream.codec import Rows, encode
from delta_tracker.stream.log import Claim, StreamLog
from delta_tracker.stream.manifest import Block, Kind, Manifest, part_from_json, part_to_json
from delta_tracker.stream.ranks import DEFAULT_TIMEOUT, Ranks
from delta_tracker.stream.storage import Storage, open_storage
from delta_tracker.tracker import ModelDeltaTracker
from delta_tracker.types import Delta, ShardSpec


class Publisher:
    """Publishes what changed since its last version, from all ranks, as one version.

    Every rank builds one, and every rank calls :meth:`publish` and :meth:`snapshot` at the same batch, from the thread
    that built it, which is the one that trains. Each rank writes its own rows; ranks exchange a few hundred bytes,
    never rows. The version exists once rank 0 has created its manifest. Until then nothing is visible and every row
    stays pending, whatever fails.

    Building one claims the stream: a publisher of an older generation is fenced from then on. What the stream holds
    of this trainer is unknown at that moment, so the first version of a publisher is a snapshot. It also reserves its
    consumer, so that no other reader can take rows out of the stream.

    Args:
        tracker: whose rows.
        url: the stream, ``file:///directory``, ``s3://bucket/prefix``, ... or an opened
            :class:`~delta_tracker.stream.storage.Storage`; the same place for every rank.
        consumer: the tracker's consumer that this publisher reads as; may be left out when there is only one.
        top_k: publish a part of the rows only, those that changed most; the others stay pending.
        timeout: how long ranks wait for each other.

    Raises:
        UnknownConsumerError: if the tracker has no such consumer.
        ReservedConsumerError: if another publisher reads as it.
        DetachedError: if the tracker is detached.
        InvalidArgumentError: for a url that names no store.
        StorageError: if this rank cannot use the store.
        PublishError: if another rank cannot, or uses another one.
        RankLostError: if a rank dies meanwhile.
    """

    def __init__(
        self,
        tracker: ModelDeltaTracker,
        url: str | Storage,
        consumer: str | None = None,
        *,
        top_k: TopK | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self._tracker = tracker
        self._top_k = top_k
        self._ranks = Ranks(timeout)
        self._claim: Claim | None = None
        self._has_snapshot = False
        self._thread = threading.get_ident()
        self._storage: Storage
        self._consumer: str | None = None
        try:
            self._exchange("open", lambda: self._open(url, consumer))
            self._head = self._from_rank_0("claim", self._take_stream)
            self._exchange("check", self._check_same_store)
        except BaseException:
            self.close()
            raise

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
        """Publish the rows that changed since the last version; all rows where the stream cannot be known to hold them.

        That is so for the first version of a publisher, and when the tracker has given its consumer up. A version
        without changed rows is published too: it tells predictors how fresh they are. Rows whose update is under way
        are in this version and again in the next.

        Returns:
            The committed manifest, the same on every rank.

        Raises:
            FencedError: if a newer publisher has the stream, on every rank; nothing was published.
            PublishError: if another rank failed, or stands at another batch; every row stays pending.
            StorageError: if this rank could not write; every row stays pending.
            RankLostError: if a rank died or did not answer; every row stays pending.
            InvalidArgumentError: after :meth:`close`, or from another thread than the one that built it.
        """
        return self._publish("delta")

    def snapshot(self) -> Manifest:
        """Publish every row of every table, as they are now; also after weights were loaded or edited by hand.

        Returns, raises: as :meth:`publish`.
        """
        return self._publish("snapshot")

    def close(self) -> None:
        """Release the consumer and leave the ranks' group; every rank calls it. The stream stays claimed."""
        if self._consumer is not None:
            self._tracker.release(self._consumer, self)
        self._consumer = None
        self._ranks.close()

    def _publish(self, kind: Kind) -> Manifest:
        if self._consumer is None:
            raise InvalidArgumentError("publisher", "closed", "Build a new Publisher")
        if threading.get_ident() != self._thread:
            raise InvalidArgumentError("thread", threading.current_thread().name, "Publish from the training thread")
        kind = self._agree(kind)
        reads: list[Delta] = []
        try:
            votes = self._exchange("part", lambda: self._write_part(kind, reads))
            draft = Manifest(
                stream=self._head.stream,
                generation=self._head.generation,
                writer=self._head.writer,
                version=self._head.version + 1,
                kind=kind,
                batches=reads[0].batches,
                created=time.time(),
                pending_rows=sum(vote["pending_rows"] for vote in votes),
                tables=dict(self._tracker.tables),
                parts=tuple(part_from_json(vote["part"]) for vote in votes if vote["part"] is not None),
            )
            self._head = self._from_rank_0("commit", lambda: self._commit(draft))
        except BaseException:
            for read in reads:
                self._tracker.abort(read)
            raise
        self._tracker.commit(reads[0])
        self._has_snapshot = True
        return self._head

    def _agree(self, kind: Kind) -> Kind:
        """Rank 0's kind, or a snapshot if any rank needs one, once all ranks stand at the same batch and tables."""
        assert self._consumer is not None, "open"
        needs_snapshot = not self._has_snapshot or self._tracker.needs_snapshot(self._consumer)
        order = {
            "kind": "snapshot" if needs_snapshot else kind,
            "cut": f"batch {self._tracker.num_batches}",
            "tables": f"the tables {sorted(str(table) + ' ' + fqn for fqn, table in self._tracker.tables.items())}",
        }
        orders = self._exchange("order", lambda: order)
        for rank, each in enumerate(orders):
            for field in ("cut", "tables"):
                if each[field] != orders[0][field]:
                    raise PublishError(rank, f"{each[field]} where rank 0 has {orders[0][field]}")
        agreed: Kind = "snapshot" if any(each["kind"] == "snapshot" for each in orders[1:]) else orders[0]["kind"]
        return agreed

    def _write_part(self, kind: Kind, reads: list[Delta]) -> dict[str, Any]:
        """Read and write this rank's rows; their record, or None where there are none."""
        tracker = self._tracker
        if self._consumer is not None and tracker.needs_snapshot(self._consumer):
            self._has_snapshot = False  # until this one is committed: what was pending is gone
            tracker.clear(self._consumer, owner=self)
        whole = kind == "snapshot"
        delta = tracker.get_delta(
            self._consumer, commit=False, with_values=not whole, top_k=None if whole else self._top_k, owner=self
        )
        reads.append(delta)
        rows = [
            block
            for fqn, shard in tracker.shards.items()
            # A table that every rank holds is rank 0's to write.
            if self._ranks.rank == 0 or not shard.is_replicated
            for block in (self._whole_blocks(fqn, shard) if whole else _delta_blocks(delta, fqn, shard))
        ]
        if not rows:
            return {"part": None, "pending_rows": delta.pending_rows}
        unique = f"{self._head.version + 1:020d}-g{self._head.generation}-r{self._ranks.rank}-{secrets.token_hex(8)}"
        part, buffers = encode(rows, f"parts/{unique}.safetensors")
        self._storage.put(part.name, buffers)
        return {"part": part_to_json(part), "pending_rows": delta.pending_rows}

    def _whole_blocks(self, fqn: str, shard: ShardSpec) -> Iterator[Rows]:
        rows = (shard.row_offset, shard.row_offset + shard.num_rows)
        for columns, view in zip(shard.columns, self._tracker.column_views(fqn), strict=True):
            if shard.num_rows:
                yield Rows(Block(fqn, rows, columns, shard.num_rows, whole=True), None, view)

    def _open(self, url: str | Storage, consumer: str | None) -> dict[str, Any]:
        self._consumer = self._tracker.reserve(consumer, self)
        self._storage = open_storage(url, create=True)
        return {}

    def _take_stream(self) -> Manifest:
        self._claim = StreamLog(self._storage).claim()
        return self._claim.head

    def _check_same_store(self) -> dict[str, Any]:
        """Every rank must see rank 0's claim: parts that land in another place would be missing for good."""
        seen = StreamLog(self._storage).read(self._head.version)
        if seen is None or seen.writer != self._head.writer:
            raise InvalidArgumentError(
                "url", self._storage.url, "Give all ranks the same store: this one lacks rank 0's claim"
            )
        return {}

    def _commit(self, draft: Manifest) -> Manifest:
        assert self._claim is not None, "only rank 0 commits"
        return self._claim.commit(draft)

    def _from_rank_0(self, phase: str, action: Callable[[], Manifest]) -> Manifest:
        """The manifest that rank 0 gets from ``action``, on every rank; or its error, on every rank."""
        answers = self._exchange(phase, lambda: {"entry": action().to_json().decode()} if self._ranks.rank == 0 else {})
        return Manifest.from_json("entry of rank 0", answers[0]["entry"].encode())

    def _exchange(self, phase: str, action: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Each rank's message from ``action``. A rank that fails says so to the others before it raises."""
        failure: Exception | None = None
        try:
            message = action()
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it; raised below
            failure, message = error, {"error": f"{type(error).__name__}: {error}"}
            if isinstance(error, FencedError):
                message["fenced"] = [error.generation, error.owner, error.version]
        messages = self._ranks.exchange(message | {"phase": phase})
        if failure is not None:
            raise failure
        for rank, each in enumerate(messages):
            if "fenced" in each:
                raise FencedError(*each["fenced"])
            if "error" in each:
                raise PublishError(rank, each["error"])
            if each["phase"] != phase:
                raise PublishError(rank, f"the call {each['phase']!r} where rank {self._ranks.rank} is at {phase!r}")
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
