"""Write a version from all ranks: each rank writes its parts, and rank 0 creates the manifest."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any

from msgspec import convert, to_builtins
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, LostEntryError, RankFailedError
from delta_tracker.monitor.recorder import Recorder
from delta_tracker.publisher.exchange import Exchange, Message, Phase, check_alike
from delta_tracker.publisher.host_copies import SelectedRows
from delta_tracker.publisher.rank_tables import CopiedRows, RankSchema
from delta_tracker.publisher.training import TakenState
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.manifest import FORMAT, DenseSpec, Kind, Manifest, Part, Stored, entry_name
from delta_tracker.stream.format.parse import check_columns, parse_manifest
from delta_tracker.stream.format.part_writer import put_part, put_training
from delta_tracker.stream.log import Claim, ClaimedStream, StreamLog, part_name
from delta_tracker.stream.reading.runtime import Runtime
from delta_tracker.stream.storage.storage import Location, Storage, open_storage
from delta_tracker.stream.storage.store import Repeatable
from delta_tracker.types import Identity, TableSpec, TableStates


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Data of one rank for a version that has not been written yet.

    Args:
        kind: ``"snapshot"`` or ``"delta"``.
        batches: half-open range of ``tracker.step()`` counts that the version covers.
        cut: Unix time in seconds at which the rows were read.
        schema: schema of this rank's rows.
        copied: rows and dense tensors to write.
        pending_rows: number of changed rows on this rank that ``top_k`` did not select. They stay pending.
        parts: parts of the version that this rank has already written.
        training: training state of this rank, whose tensors are being copied; None for a version without states.
        owner_changes: host copy of a ``[2]`` int64 tensor for each table, by FQN. It contains the numbers of raw ids
            that gained and lost a row of this rank since the previous version. None if the raw ids of the previous
            version are unknown.
    """

    kind: Kind
    batches: tuple[int, int]
    cut: float
    schema: RankSchema
    copied: CopiedRows
    pending_rows: int = 0
    parts: Sequence[Part] = ()
    training: TakenState | None = None
    owner_changes: Mapping[str, SelectedRows] | None = None


class Coordinator:
    """Writer of one rank's parts of each version. Rank 0 also claims the stream and commits the versions.

    The training thread may call all methods. Worker threads may call :meth:`write_part`, :meth:`write`, :meth:`commit`
    and :meth:`head_message`.

    Attributes:
        is_first: True on rank 0, which commits the versions.
        storage: store of the stream.
        head: manifest of the last committed version, or of the claim before the first version.
        states: optimizer states of each table in the next delta, by FQN. Empty if versions contain no states.
    """

    def __init__(self, exchange: Exchange, recorder: Recorder, runtime: Runtime) -> None:
        self._exchange = exchange
        self._runtime = runtime
        self.rank = exchange.rank
        self.is_first = exchange.rank == 0
        self._write_timer = recorder.write_seconds.timer()
        self._commit_timer = recorder.commit_seconds.timer()
        self._claim: Claim | None = None
        self.storage: Storage
        self.states: Mapping[str, TableStates] = {}
        self.head: Manifest

    @property
    def needs_snapshot(self) -> bool:
        """True on rank 0 if the next version must be a snapshot because an entry of the stream was altered or lost."""
        return self._claim is not None and self._claim.needs_snapshot

    def skew(self) -> float | None:
        """Return this host's clock minus the store's clock, in seconds, at the commit of :attr:`head`.

        Returns None if the difference is unknown. This method sends a request to the store.
        """
        head = self.head
        stored = self.storage.stat(entry_name(head.version))
        return None if stored is None or stored.modified <= 0 else head.created - stored.modified

    def open(self, url: Location | ClaimedStream) -> None:
        """Open the store on every rank, and claim the stream on rank 0 unless ``url`` contains a claim. A collective.

        Raises UnsupportedStoreError on rank 0 if the store does not support atomic creation of objects.
        """
        exchange = self._exchange.exchange
        location, claim = (url.storage, url.claim) if isinstance(url, ClaimedStream) else (url, None)
        exchange(Phase.OPENING, Message.of(lambda: self._open(location)))
        taken = exchange(Phase.CLAIMING, Message.of(lambda: self._take_stream(claim) if self.is_first else None))
        self.set_head(taken[0])

    def check_same_store(self) -> None:
        """Raise InvalidArgumentError unless this rank's store contains rank 0's claim.

        Call this method to detect ranks that opened different stores. All ranks must write to the same store.
        """
        seen = StreamLog(self.storage, self._runtime).read(self.head.version)
        if seen is None or seen.writer != self.head.writer:
            remedy = "Give all ranks the same store: this one lacks rank 0's claim"
            raise InvalidArgumentError("url", self.storage.url, remedy)

    def release(self) -> None:
        """Mark the claim, if there is one, as unused. Call this method if the publisher could not be built."""
        if self._claim is not None:
            self._claim.release()

    def compare_cuts(self, batch: int, schema: RankSchema) -> None:
        """Raise RankFailedError unless all ranks are at the same batch and have the same tables and identities.

        A collective.
        """
        cut = Message.of(lambda: {"cut": f"batch {batch}", "tables": schema.text})
        check_alike(self._exchange.exchange(Phase.COMPARING, cut), "cut", "tables")

    def write_part(self, rows: Sequence[BlockRows], dense: Mapping[str, Tensor], *, form: int) -> Part:
        """Write a part of the next version in the format ``form``. Return the part's record for the manifest."""
        states_name = None if form == FORMAT else self._name("s")
        with self._write_timer():
            return put_part(self.storage, self._name(), rows, dense, states_name=states_name)

    def write(self, draft: Draft | Exception) -> Message:
        """Write this rank's parts of a version, and return a message that describes them.

        If ``draft`` is an error or the write fails, the message contains the error.
        """

        def act() -> dict[str, Any]:
            if isinstance(draft, Exception):
                raise draft
            copied, schema, parts = draft.copied, draft.schema, [*draft.parts]
            for copy in copied.copies:
                copy.result()
            if copied.rows or copied.dense:
                parts.append(self.write_part(copied.rows, copied.dense, form=schema.format))
            content: dict[str, Any] = {
                "parts": [asdict(part) for part in parts] if self.rank else parts,  # rank 0 does not send its share
                "pending_rows": draft.pending_rows,
                "cut": f"batch {draft.batches[1]}",
                "tables": schema.text,
            }
            if draft.owner_changes is not None:
                content["owner_changes"] = {fqn: counts.copied.tolist() for fqn, counts in draft.owner_changes.items()}
            if draft.training is not None:
                training = self._write_training(draft.training)
                content |= {"training": asdict(training), "event_time": draft.training.event_time}
                if draft.kind == "snapshot":
                    content["states"] = to_builtins(schema.states)
            return content

        return Message.of(act)

    def commit(self, draft: Draft, shares: Sequence[Mapping[str, Any]]) -> Manifest:
        """Create the manifest of a version, and return it. Only rank 0 may call this method.

        ``draft`` is rank 0's draft. ``shares`` are the contents of the messages that :meth:`write` returned on all
        ranks, in rank order. Raises the same errors as :meth:`Claim.commit`. After a StorageError, the version may have
        been committed. If so, the next call continues from this version.
        """
        assert self._claim is not None, "only rank 0 commits"
        schema, states = draft.schema, self.states
        others = [convert(part, Part) for share in shares[1:] for part in share["parts"]]
        if draft.training is not None and draft.kind == "snapshot":
            states = declared_states([share["states"] for share in shares], schema.tables)
        entry = Manifest(
            stream=self.head.stream,
            generation=self.head.generation,
            writer=self.head.writer,
            version=self.head.version + 1,
            kind=draft.kind,
            batches=draft.batches,
            cut=draft.cut,
            created=self._runtime.clock(),
            pending_rows=sum(map(itemgetter("pending_rows"), shares)),
            tables=dict(schema.tables),
            dense={name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in draft.copied.dense.items()},
            parts=(*shares[0]["parts"], *others),
            format=schema.format,
            identities=schema.identities,
            owner_changes=_owner_changes(shares, schema.identities) if schema.identities else {},
        )
        if draft.training is not None:
            training = tuple([convert(share["training"], Stored) for share in shares])
            times = [share["event_time"] for share in shares if share["event_time"] is not None]
            entry = replace(entry, states=states, training=training, event_time=min(times, default=None))
        with self._commit_timer():
            committed = self._claim.commit(entry)
        self.states = states
        return committed

    def head_message(self) -> dict[str, Any]:
        """Return the content of rank 0's message about the last entry. Return an empty dict on the other ranks."""
        return {} if self._claim is None else {"entry": self._claim.data.decode()}

    def set_head(self, message: Mapping[str, Any]) -> Manifest:
        """Set :attr:`head` to the last entry, and return it. ``message`` is rank 0's result of :meth:`head_message`."""
        if self._claim is not None:
            self.head = self._claim.head
        else:
            self.head = parse_manifest("entry of rank 0", message["entry"].encode())
        return self.head

    def lost(self, error: LostEntryError) -> None:
        """Set :attr:`head` to the new claim in ``error``. Rank 0 created this claim because an entry was lost."""
        self.head = parse_manifest("entry of rank 0", error.claim.encode())

    def _write_training(self, taken: TakenState) -> Stored:
        copied = [selection.copied for selection in taken.selections]
        with self._write_timer():
            buffers = Repeatable(lambda: taken.tree.buffers(copied))
            return put_training(self.storage, self._name("t"), buffers, taken.tree.num_bytes)

    def _name(self, role: str = "") -> str:
        """Return a new object name. ``role`` is empty for a part, "s" for row states, or "t" for a training state."""
        return part_name(self.head.version + 1, self.head.generation, f"r{self.rank}{role}")

    def _open(self, url: Location) -> None:
        self.storage = open_storage(url, create=True)

    def _take_stream(self, claim: Claim | None) -> dict[str, Any]:
        self.storage.probe()
        claim = StreamLog(self.storage, self._runtime).claim() if claim is None else claim
        claim.mark_used()
        self._claim = claim
        return self.head_message()


def _owner_changes(
    shares: Sequence[Mapping[str, Any]], identities: Mapping[str, Identity]
) -> dict[str, tuple[int, int]]:
    """Return the numbers of raw ids that gained and lost a row on all ranks, by FQN; an empty dict if unknown."""
    if not all("owner_changes" in share for share in shares):
        return {}
    found = dict.fromkeys(identities, (0, 0))
    for share in shares:
        for fqn, (admitted, evicted) in share["owner_changes"].items():
            found[fqn] = found[fqn][0] + admitted, found[fqn][1] + evicted
    return found


def declared_states(messages: Sequence[Mapping[str, Any]], tables: Mapping[str, TableSpec]) -> dict[str, TableStates]:
    """Combine the specs of optimizer states on each rank into specs for whole tables, and return them by FQN.

    ``messages`` contains a mapping for each rank, in rank order. It maps FQNs to specs of the optimizer states of the
    rank's column ranges, as JSON values. Tables without specs are omitted. Raises RankFailedError if the optimizer or
    the states of a table differ between ranks, or if the column ranges do not cover each column once.
    """
    first: dict[str, TableStates] = {}
    columns: dict[str, set[tuple[int, int]]] = {}
    for rank, message in enumerate(messages):
        for fqn, states in convert(message, dict[str, TableStates]).items():
            known = first.setdefault(fqn, states)
            if replace(known, columns=states.columns) != states:
                raise RankFailedError(rank, f"{_shown(fqn, states)} where another rank has {_shown(fqn, known)}")
            columns.setdefault(fqn, set()).update(states.columns)
    found = {}
    for fqn in [each for each in tables if each in first]:
        found[fqn] = replace(first[fqn], columns=tuple(sorted(columns[fqn])))
        try:
            check_columns(tables[fqn], found[fqn].columns)
        except ValueError as error:
            raise RankFailedError(0, f"shards of different sizes: {error}") from error
    return found


def _shown(fqn: str, table: TableStates) -> str:
    states = ", ".join(f"{each.name} {each.dtype_name} per {each.width}" for each in table.states)
    return f"the optimizer {table.optimizer} with {states or 'no states'} for {fqn!r}"
