"""The ranks of one publisher, which write a version together: each its parts, rank 0 the entry that names them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.exchange import Exchange, Message, Phase, Vote, check_alike
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.manifest import DenseSpec, Kind, Manifest, Part
from delta_tracker.stream.format.parse import parse_manifest, parse_part
from delta_tracker.stream.format.part_writer import PartWriter
from delta_tracker.stream.log import Claim, StreamLog, part_name
from delta_tracker.stream.storage.storage import Storage, open_storage
from delta_tracker.types import TableSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What one rank has of a version.

    Args:
        kind: snapshot or delta.
        batches: half-open range of step counts that it covers.
        cut: unix time at which the rows were read.
        tables: FQN to table, the same on every rank.
        pending_rows: changed rows of this rank that it leaves out.
        parts: parts that are written already.
        rows: rows that are still to be written.
        dense: dense tensors that are still to be written.
    """

    kind: Kind
    batches: tuple[int, int]
    cut: float
    tables: Mapping[str, TableSpec]
    pending_rows: int = 0
    parts: Sequence[Part] = ()
    rows: Sequence[BlockRows] = ()
    dense: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has written of a version.

    Args:
        draft: what it was made of, or why there was nothing to make it of.
        parts: its parts.
        message: tells the other ranks of them, or what failed.
    """

    draft: Draft | Exception
    parts: Sequence[Part]
    message: Message


class Coordinator:
    """This rank's hand in the versions of a stream.

    The training thread starts what the ranks tell each other; a worker may call the methods that say so.

    Args:
        exchange: the ranks.
        recorder: records how long writes and commits take.
    """

    def __init__(self, exchange: Exchange, recorder: Recorder) -> None:
        self._exchange = exchange
        self._rank = exchange.rank
        self._write_timer = recorder.write_seconds.timer()
        self._commit_timer = recorder.commit_seconds.timer()
        self._claim: Claim | None = None
        self._tables: Mapping[str, TableSpec] = {}
        self._tables_text = "no tables"
        self._tables_hash = 0
        self._storage: Storage
        self.head: Manifest

    @property
    def storage(self) -> Storage:
        """Where the stream lies."""
        return self._storage

    def open(self, url: str | Storage) -> None:
        """Open the store on every rank, probe it and claim the stream on rank 0, and see that all have the same.

        A collective.

        Raises:
            InvalidArgumentError: for a url that names no store.
            UnsafeStoreError: if the store lets two writers create one object.
            MalformedError: if the stream's head is no entry.
            StorageError: if this rank cannot use the store.
            PublishError: if another rank cannot, or uses another one.
            RankLostError: if a rank dies meanwhile.
        """
        exchange = self._exchange.exchange
        exchange(Phase.OPENING, Message.of(lambda: self._open(url)))
        self._follow(exchange(Phase.CLAIMING, Message.of(lambda: self._take_stream() if self._rank == 0 else {})))
        exchange(Phase.CHECKING, Message.of(self._check_same_store))

    def vote(self, phase: Phase, batch: int, tables: Mapping[str, TableSpec]) -> Vote:
        """Return a vote that says where this rank is. No collective."""
        self._describe(tables)
        return Vote(phase, batch, self._tables_hash)

    def compare_places(self, batch: int, tables: Mapping[str, TableSpec]) -> None:
        """See which rank does not stand at the same batch as rank 0, with the same tables. A collective.

        Raises:
            PublishError: if a rank stands elsewhere.
            RankLostError: if a rank dies meanwhile.
        """
        place = Message.of(lambda: self._place(batch, tables))
        check_alike(self._exchange.exchange(Phase.PLACING, place), "cut", "tables")

    def write_part(self, rows: Sequence[BlockRows], dense: Mapping[str, Tensor] | None = None) -> Part:
        """Write a part of the next version. A worker may call it.

        Raises:
            StorageError: if it cannot be written.
        """
        name = part_name(self.head.version + 1, self.head.generation, f"r{self._rank}")
        writer = PartWriter(name, rows, dense)
        with self._write_timer():
            self._storage.put(name, writer.buffers())
        return writer.part

    def write(self, draft: Draft | Exception) -> Share:
        """Write what this rank has of a version. A worker may call it; what fails is in the share's message.

        Args:
            draft: what this rank has, or why it has nothing.
        """
        parts: list[Part] = []

        def act() -> dict[str, Any]:
            if isinstance(draft, Exception):
                raise draft
            parts.extend(draft.parts)
            if draft.rows or draft.dense:
                parts.append(self.write_part(draft.rows, draft.dense))
            return {
                "parts": [asdict(part) for part in parts] if self._rank else [],  # rank 0 has its own
                "pending_rows": draft.pending_rows,
                **self._place(draft.batches[1], draft.tables),
            }

        return Share(draft, parts, Message.of(act))

    def tally(self, share: Share, num_bytes: int) -> list[dict[str, Any]]:
        """Return the messages of all ranks' shares, by rank. A collective.

        Args:
            share: of this rank.
            num_bytes: length of the longest message of a rank.

        Raises:
            PublishError: if another rank failed, or is at another batch.
            Exception: the failure of this rank.
            RankLostError: if a rank dies meanwhile.
        """
        messages = self._exchange.gather(share.message, num_bytes)
        check_alike(messages, "cut", "tables")
        return messages

    def commit(self, share: Share, messages: Sequence[Mapping[str, Any]]) -> Manifest:
        """Create the entry of a version. The worker of rank 0 may call it, nobody else.

        Args:
            share: of rank 0.
            messages: those of all ranks' shares.

        Raises:
            FencedError: if a newer publisher has the stream.
            StorageError: if the store failed. Predictors may have the version; the next one then continues behind it.
        """
        draft = share.draft
        assert self._claim is not None, "only rank 0 commits"
        assert not isinstance(draft, Exception), "a share without a draft is not told"
        others = [parse_part(part) for message in messages[1:] for part in message["parts"]]
        entry = Manifest(
            stream=self.head.stream,
            generation=self.head.generation,
            writer=self.head.writer,
            version=self.head.version + 1,
            kind=draft.kind,
            batches=draft.batches,
            cut=draft.cut,
            created=time.time(),
            pending_rows=sum([message["pending_rows"] for message in messages]),
            tables=dict(draft.tables),
            dense={name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in draft.dense.items()},
            parts=(*share.parts, *others),
        )
        with self._commit_timer():
            return self._claim.commit(entry)

    def publish(self, draft: Draft) -> Manifest:
        """Write, vote and commit a version in one call, for a caller that trains in between. A collective.

        Returns:
            The committed entry, the same on every rank.

        Raises:
            FencedError: if a newer publisher has the stream, on every rank.
            PublishError: if another rank failed, or stands at another batch.
            StorageError: if this rank could not write.
            RankLostError: if a rank dies meanwhile.
        """
        share = self.write(draft)
        messages = self._exchange.exchange(Phase.WRITING, share.message)

        def commit() -> dict[str, Any]:
            if self._claim is not None:
                self.commit(share, messages)
            return self.answer()

        check_alike(messages, "cut", "tables")
        self._follow(self._exchange.exchange(Phase.COMMITTING, Message.of(commit)))
        return self.head

    def answer(self) -> dict[str, Any]:
        """Return what rank 0 tells the others of the entry that it created last; nothing on the others."""
        return {} if self._claim is None else {"entry": self._claim.data.decode()}

    def accept(self, own: Message, num_bytes: int) -> Manifest:
        """Return the entry that rank 0 has created, on every rank, or raise the error of :meth:`commit`. A collective.

        Args:
            own: message of this rank.
            num_bytes: length of the longest message of a rank.

        Raises: as :meth:`~delta_tracker.publisher.exchange.Exchange.gather`.
        """
        self._follow(self._exchange.gather(own, num_bytes))
        return self.head

    def _open(self, url: str | Storage) -> dict[str, Any]:
        self._storage = open_storage(url, create=True)
        return {}

    def _take_stream(self) -> dict[str, Any]:
        self._storage.probe()
        self._claim = StreamLog(self._storage).claim()
        return self.answer()

    def _check_same_store(self) -> dict[str, Any]:
        """Every rank must see rank 0's claim: parts that land in another place would be missing for good."""
        seen = StreamLog(self._storage).read(self.head.version)
        if seen is None or seen.writer != self.head.writer:
            raise InvalidArgumentError(
                "url", self._storage.url, "Give all ranks the same store: this one lacks rank 0's claim"
            )
        return {}

    def _follow(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Make the entry of rank 0 the head. Rank 0 has it; the others parse the bytes that are in the log."""
        if self._claim is not None:
            self.head = self._claim.head
        else:
            self.head = parse_manifest("entry of rank 0", messages[0]["entry"].encode())

    def _describe(self, tables: Mapping[str, TableSpec]) -> None:
        if tables != self._tables:
            self._tables = dict(tables)
            self._tables_text = f"the tables {sorted(f'{table} {fqn}' for fqn, table in tables.items())}"
            self._tables_hash = xxhash.xxh64_intdigest(self._tables_text.encode()) >> 1  # it has to fit an int64

    def _place(self, batch: int, tables: Mapping[str, TableSpec]) -> dict[str, str]:
        """Return where this rank is, to be compared with the other ranks."""
        self._describe(tables)
        return {"cut": f"batch {batch}", "tables": self._tables_text}
