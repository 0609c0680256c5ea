"""The ranks of one publisher, which write a version together: each its parts, rank 0 the entry that names them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from torch import Tensor

from delta_tracker.errors import FencedError, InvalidArgumentError, PublishError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.ranks import Ranks
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


class Coordinator:
    """This rank's hand in the versions of a stream. Methods are collectives of its ranks unless they say otherwise.

    A method that raises has published nothing; a rank that fails says so to the others before it raises.

    Args:
        timeout: how long ranks wait for each other.
        recorder: records how long writes and commits take.
    """

    def __init__(self, timeout: timedelta, recorder: Recorder) -> None:
        self._ranks = Ranks(timeout)
        self.rank = self._ranks.rank
        self._write_timer = recorder.write_seconds.timer()
        self._commit_timer = recorder.commit_seconds.timer()
        self._claim: Claim | None = None
        self._tables: Mapping[str, TableSpec] = {}
        self._tables_text = "no tables"
        self._storage: Storage
        self.head: Manifest

    @property
    def storage(self) -> Storage:
        """Where the stream lies."""
        return self._storage

    def open(self, url: str | Storage) -> None:
        """Open the store on every rank, probe it and claim the stream on rank 0, and see that all have the same.

        Raises:
            InvalidArgumentError: for a url that names no store.
            UnsafeStoreError: if the store lets two writers create one object.
            MalformedError: if the stream's head is no entry.
            StorageError: if this rank cannot use the store.
            PublishError: if another rank cannot, or uses another one.
            RankLostError: if a rank dies meanwhile.
        """
        self.exchange("open", lambda: self._open(url))
        self.head = self._from_rank_0("claim", self._take_stream)
        self.exchange("check", self._check_same_store)

    def agree(self, kind: Kind, batch: int, tables: Mapping[str, TableSpec]) -> Kind:
        """Rank 0's kind, or a snapshot if any rank wants one, once all ranks stand at the same batch and tables.

        Raises:
            PublishError: if a rank stands elsewhere.
            RankLostError: if a rank dies meanwhile.
        """
        orders = self.exchange("order", lambda: {"kind": kind, **self._place(batch, tables)})
        check_alike(orders, "cut", "tables")
        agreed: Kind = "snapshot" if any(each["kind"] == "snapshot" for each in orders) else orders[0]["kind"]
        return agreed

    def write_part(self, rows: Sequence[BlockRows], dense: Mapping[str, Tensor] | None = None) -> Part:
        """Write a part of the next version. No collective.

        Raises:
            StorageError: if it cannot be written.
        """
        name = part_name(self.head.version + 1, self.head.generation, f"r{self.rank}")
        writer = PartWriter(name, rows, dense)
        with self._write_timer():
            self._storage.put(name, writer.buffers())
        return writer.part

    def commit(self, draft: Draft | Exception) -> Manifest:
        """Write what every rank has of a version, then create its entry.

        Args:
            draft: what this rank has, or why it has nothing; the other ranks then raise a PublishError.

        Returns:
            The committed entry, the same on every rank.

        Raises:
            FencedError: if a newer publisher has the stream, on every rank.
            PublishError: if another rank failed, or stands at another batch.
            StorageError: if this rank could not write.
            RankLostError: if a rank dies meanwhile.
        """
        parts: list[Part] = []

        def write() -> dict[str, Any]:
            if isinstance(draft, Exception):
                raise draft
            parts.extend(draft.parts)
            if draft.rows or draft.dense:
                parts.append(self.write_part(draft.rows, draft.dense))
            return {
                "parts": [asdict(part) for part in parts] if self.rank else [],  # rank 0 has its own
                "pending_rows": draft.pending_rows,
                **self._place(draft.batches[1], draft.tables),
            }

        votes = self.exchange("part", write)
        check_alike(votes, "cut", "tables")
        assert not isinstance(draft, Exception), "raised by the exchange"
        with self._commit_timer():
            self.head = self._from_rank_0("commit", lambda: self._commit(draft, parts, votes))
        return self.head

    def exchange(self, phase: str, action: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Each rank's message from ``action``, small and of JSON's types, by rank.

        Raises:
            FencedError: if a rank raised it.
            PublishError: if another rank raised something else, or is in another phase.
            RankLostError: if a rank dies meanwhile.
        """
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
                raise PublishError(rank, f"the call {each['phase']!r} where rank {self.rank} is at {phase!r}")
        return messages

    def close(self) -> None:
        """Leave the ranks' group."""
        self._ranks.close()

    def _open(self, url: str | Storage) -> dict[str, Any]:
        self._storage = open_storage(url, create=True)
        return {}

    def _take_stream(self) -> Claim:
        self._storage.probe()
        self._claim = StreamLog(self._storage).claim()
        return self._claim

    def _check_same_store(self) -> dict[str, Any]:
        """Every rank must see rank 0's claim: parts that land in another place would be missing for good."""
        seen = StreamLog(self._storage).read(self.head.version)
        if seen is None or seen.writer != self.head.writer:
            raise InvalidArgumentError(
                "url", self._storage.url, "Give all ranks the same store: this one lacks rank 0's claim"
            )
        return {}

    def _commit(self, draft: Draft, own: Sequence[Part], votes: Sequence[Mapping[str, Any]]) -> Claim:
        """Commit a version on rank 0, from its draft, its parts and what all ranks voted."""
        assert self._claim is not None, "only rank 0 commits"
        others = [parse_part(part) for vote in votes[1:] for part in vote["parts"]]
        entry = Manifest(
            stream=self.head.stream,
            generation=self.head.generation,
            writer=self.head.writer,
            version=self.head.version + 1,
            kind=draft.kind,
            batches=draft.batches,
            cut=draft.cut,
            created=time.time(),
            pending_rows=sum([vote["pending_rows"] for vote in votes]),
            tables=dict(draft.tables),
            dense={name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in draft.dense.items()},
            parts=(*own, *others),
        )
        self._claim.commit(entry)
        return self._claim

    def _from_rank_0(self, phase: str, action: Callable[[], Claim]) -> Manifest:
        """Return the head of the claim that ``action`` returns on rank 0, on every rank; or raise its error there.

        Rank 0 has the entry; the other ranks parse the bytes that are in the log.
        """
        answers = self.exchange(phase, lambda: {"entry": action().data.decode()} if self.rank == 0 else {})
        if self._claim is not None:
            return self._claim.head
        return parse_manifest("entry of rank 0", answers[0]["entry"].encode())

    def _place(self, batch: int, tables: Mapping[str, TableSpec]) -> dict[str, str]:
        """Return where this rank is, to be compared with the other ranks."""
        if tables != self._tables:
            self._tables = dict(tables)
            self._tables_text = f"the tables {sorted(f'{table} {fqn}' for fqn, table in tables.items())}"
        return {"cut": f"batch {batch}", "tables": self._tables_text}


def check_alike(messages: Sequence[Mapping[str, Any]], *names: str) -> None:
    """Check that the ranks' messages agree in ``names``.

    Raises:
        PublishError: if a rank's message differs from that of rank 0.
    """
    for rank, each in enumerate(messages):
        for name in names:
            if each[name] != messages[0][name]:
                raise PublishError(rank, f"{each[name]} where rank 0 has {messages[0][name]}")
