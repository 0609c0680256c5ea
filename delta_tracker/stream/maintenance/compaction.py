"""Compaction: versions merged into larger ones, and into snapshots, so that a reader has less to read.

A merged entry stands beside the log and says nothing new. It is created if absent, after its parts, so any process may
merge at any time, beside publishers, readers, retention and others of its kind: of two that merge the same versions one
entry is created, and either would have been right. One that dies leaves parts that nothing names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from delta_tracker.errors import CorruptPartError, InvalidArgumentError, MalformedError, StorageError
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.manifest import DenseSpec, Manifest, Part
from delta_tracker.stream.format.overlay import Overlay, WholeBlocks
from delta_tracker.stream.format.part_reader import PartReader, read_parts
from delta_tracker.stream.format.part_writer import PartWriter
from delta_tracker.stream.log import Merged, StreamLog, entry_name, part_name
from delta_tracker.stream.maintenance.merging import listed_rows, newest_rows
from delta_tracker.stream.maintenance.retention import ORPHAN_SECONDS
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec

DEFAULT_MAX_BYTES = 1 << 30
_ID_BYTES = 8

_Dense = dict[str, Tensor]


def compact(
    stream: Storage | StreamLog,
    *,
    fold: float = 0.5,
    max_bytes: int = DEFAULT_MAX_BYTES,
    min_versions: int = 2,
    now: Callable[[], float] = time.time,
) -> Manifest | None:
    """Merge the deltas behind the newest snapshot into a larger one, or with the snapshot into a newer snapshot.

    A delta takes up the merged one before it. A merged entry has generation, writer, cut, pending rows and tables of
    the last version that it stands for; a merged snapshot keeps the blocks of the one before it, with newer rows in
    their places. Rows that do not fit its blocks, for another encoding or other columns, stand beside them.

    Memory: the rows of at most ``max_bytes`` of versions as they are stored, with some 40 bytes for each while they are
    sorted, and of the snapshot one part of up to 256 MiB or a few pieces of 8 MiB of a larger one. What does not fit is
    left to a later call. A version that is larger by itself is never merged, nor is the snapshot before it. Deltas
    beyond ``max_bytes`` are folded into their snapshot piece by piece, each at the cost of writing the snapshot: choose
    ``max_bytes`` around ``fold`` times its size.

    Args:
        stream: where the stream lies, or its log.
        fold: make a snapshot once the merged deltas behind it have this part of its bytes.
        max_bytes: bound of what is held in memory.
        min_versions: merge only if there are so many deltas that are not merged yet.
        now: the time in Unix seconds.

    Returns:
        The merged entry, also where another process created it first; None if there is nothing to merge.

    Raises:
        InvalidArgumentError: for a bound that is none.
        MalformedError, CorruptPartError: if a version is not what it says it is; nothing was merged.
        StorageError: if the store fails, or is so slow that retention may have taken the parts for left behind ones.
    """
    check_bounds(fold, max_bytes, min_versions)
    log = stream if isinstance(stream, StreamLog) else StreamLog(stream)
    base = log.newest_snapshot()
    if base is None:
        return None
    pieces = _pieces(log, base)
    compaction = _Compaction(log, base, max_bytes, now)
    versions: Sequence[Manifest] = ()
    try:
        # What is left behind a fold counts as well: otherwise deltas that never fit at once would grow for ever.
        versions = _run(pieces, max_bytes - compaction.base_bytes)
        is_due = _num_new(versions) >= min_versions
        num_bytes = sum(piece.num_bytes for piece in pieces if is_due or piece.merges is not None)
        if versions and num_bytes >= fold * base.num_bytes and _tables(versions) == base.tables:
            behind = sum(piece.num_bytes for piece in pieces[len(versions) :])
            return compaction.fold(versions, fold * base.num_bytes - behind, is_due=is_due)
        for start in range(len(pieces)):
            versions = _run(pieces[start:], max_bytes)
            if _num_new(versions) >= min_versions:
                return compaction.merge(versions)
    except CorruptPartError:
        newest = log.newest_snapshot()
        is_newest = newest is not None and newest.link == base.link
        if is_newest and all(_is_there(log, version) for version in (base, *versions)):
            raise
        # Retention took a version meanwhile, because a newer snapshot stands in its place.
    return None


class _Compaction:
    """One merged entry in the making."""

    def __init__(self, log: StreamLog, base: Manifest, max_bytes: int, now: Callable[[], float]) -> None:
        self._log = log
        self._base = base
        self._max_bytes = max_bytes
        self._now = now
        self._started = now()
        blocks = [block for part in base.parts for block in part.blocks if block.num_rows]
        self._whole = [block for block in blocks if block.ids == "all"]
        # What a fold holds of the snapshot: the rows beside its whole blocks.
        self.base_bytes = sum(block.num_rows * (block.row_bytes + _ID_BYTES) for block in blocks if block.ids != "all")

    def fold(self, versions: Sequence[Manifest], least_bytes: float, *, is_due: bool) -> Manifest | None:
        """Merge with the snapshot; into a delta where that ``is_due`` and has less than ``least_bytes``."""
        rows, dense = self._read(versions)
        tables = _tables(versions)
        if is_due:
            merged = list(newest_rows(rows, tables))
            if sum(each.num_bytes for each in merged) + sum(each.nbytes for each in dense.values()) < least_bytes:
                return self._merge(versions, merged, dense)
        newest = list(newest_rows([*self._listed(), *rows], tables))
        parts, base_dense = self._write_over(Overlay(newest), versions[-1])
        blocks = WholeBlocks(self._whole)
        outside = [left for each in newest for left in blocks.outside(each) if left.block.num_rows]
        parts += self._put(outside, base_dense | dense, versions[-1])
        return self._create(_snapshot(self._base, versions), parts, base_dense | dense)

    def merge(self, versions: Sequence[Manifest]) -> Manifest | None:
        """Merge into a delta."""
        rows, dense = self._read(versions)
        return self._merge(versions, list(newest_rows(rows, _tables(versions))), dense)

    def _merge(self, versions: Sequence[Manifest], newest: list[BlockRows], dense: _Dense) -> Manifest | None:
        parts = self._put(newest, dense, versions[-1])
        return self._create(_delta(versions), parts, dense)

    def _read(self, versions: Sequence[Manifest]) -> tuple[list[BlockRows], _Dense]:
        rows: list[BlockRows] = []
        dense: _Dense = {}
        for version in versions:
            parts = read_parts(self._log.storage, version, memory_bytes=self._max_bytes)
            for part in parts:
                rows += listed_rows(part)
                dense |= part.dense()
        return rows, dense

    def _listed(self) -> Iterator[BlockRows]:
        """The snapshot's rows beside its whole blocks."""
        for part in self._base.parts:
            if any(block.ids != "all" for block in part.blocks):
                # Not held in memory: what is yielded are copies, and nothing else of the part stays.
                yield from listed_rows(PartReader(self._log.storage, part, self._base, memory_bytes=0))

    def _write_over(self, overlay: Overlay, last: Manifest) -> tuple[list[Part], _Dense]:
        """Write the snapshot's whole blocks anew, part by part, with newer rows in their places."""
        parts: list[Part] = []
        dense: _Dense = {}
        for part in self._base.parts:
            reader = PartReader(self._log.storage, part, self._base)
            dense |= {name: tensor.clone() for name, tensor in reader.dense().items()}
            parts += self._put([overlay.over(rows) for rows in reader.rows if rows.ids is None], {}, last)
        return parts, dense

    def _put(self, rows: Sequence[BlockRows], dense: _Dense, last: Manifest) -> list[Part]:
        """Write a part, if there is anything to write."""
        if not rows and not dense:
            return []
        name = part_name(last.version, last.generation, "c")
        writer = PartWriter(name, rows, dense)
        self._log.storage.put(name, writer.buffers())
        return [writer.part]

    def _create(self, draft: Manifest, parts: Sequence[Part], dense: _Dense) -> Manifest | None:
        specs = {name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in dense.items()}
        draft = replace(draft, created=self._now(), dense=specs, parts=tuple(parts))
        seconds = self._now() - self._started
        if seconds > ORPHAN_SECONDS / 2:
            raise StorageError(
                self._log.storage.url,
                f"a compaction took {seconds:.0f} s, and what stands in no entry for {ORPHAN_SECONDS:.0f} s is removed",
            )
        if not self._log.create_merged(draft):
            for part in parts:
                self._log.storage.delete(part.name)
        return self._log.read_merged(Merged.of(draft))


def _snapshot(base: Manifest, versions: Sequence[Manifest]) -> Manifest:
    """What a merged snapshot says of itself, without its parts."""
    return replace(_delta([base, *versions]), kind="snapshot", parent=None, snapshot=versions[-1].version)


def _delta(versions: Sequence[Manifest]) -> Manifest:
    """What a merged delta says of itself, without its parts: what the last version says that is no claim."""
    last, newest = versions[-1], [version for version in versions if version.kind != "claim"]
    return replace(
        last,
        kind="delta",
        parent=versions[0].parent,
        # A trainer that resumed counts on from an earlier step.
        batches=(min(version.batches[0] for version in newest), newest[-1].batches[1]),
        cut=newest[-1].cut,
        pending_rows=newest[-1].pending_rows,
        tables=newest[-1].tables,
        merges=last.link,
    )


def _pieces(log: StreamLog, base: Manifest) -> list[Manifest]:
    """What takes a reader from the snapshot to the head: merged deltas, the longest first, and versions behind them.

    Raises:
        MalformedError: if one does not follow the one before it.
    """
    merged = {
        each.first: each for each in log.merged(after=base.version) if each.kind == "delta"
    }  # the last is the longest
    pieces: list[Manifest] = []
    held = base
    while True:
        version = held.version + 1
        piece = log.read_merged(merged[version]) if version in merged else None
        piece = piece or log.read(version)
        if piece is None or piece.kind == "snapshot":
            return pieces
        if piece.stream != base.stream or piece.parent != held.link:
            raise MalformedError(entry_name(version), f"it follows {piece.parent} instead of {held.link}")
        pieces.append(piece)
        held = piece


def _run(pieces: Sequence[Manifest], max_bytes: int) -> list[Manifest]:
    """The first pieces, as many as have the same tables and fit; none if there is nothing in them."""
    run: list[Manifest] = []
    num_bytes = 0
    for piece in pieces:
        # Ids that are stored as gaps are held as 8 bytes.
        num_bytes += piece.num_bytes + _ID_BYTES * piece.num_rows
        tables = _tables([*run, piece])
        if num_bytes > max_bytes or (piece.kind != "claim" and piece.tables != tables):
            break
        run.append(piece)
    return run if any(piece.kind != "claim" for piece in run) else []


def _tables(versions: Sequence[Manifest]) -> Mapping[str, TableSpec]:
    """The tables of versions that all have the same; claims have none."""
    return next((version.tables for version in versions if version.kind != "claim"), {})


def _num_new(versions: Sequence[Manifest]) -> int:
    """How many deltas were never merged."""
    return sum(version.kind == "delta" and version.merges is None for version in versions)


def _is_there(log: StreamLog, version: Manifest) -> bool:
    """Whether the entry still is in the store."""
    found = log.read(version.version) if version.merges is None else log.read_merged(Merged.of(version))
    # A merged entry that was taken away may have been made again, of other parts.
    return found is not None and found.xxh3 == version.xxh3


def check_bounds(fold: float, max_bytes: int, min_versions: int, *, name: str = "min_versions") -> None:
    """Refuse what :func:`compact` cannot serve.

    Args:
        fold: as there.
        max_bytes: as there.
        min_versions: as there.
        name: what that one is called where it comes from.

    Raises:
        InvalidArgumentError: for a bound that is none.
    """
    if type(fold) not in (int, float) or not 0 < fold < float("inf"):
        raise InvalidArgumentError("fold", fold, "Pass a positive part of the snapshot's bytes, such as 0.5")
    for argument, value, least in (("max_bytes", max_bytes, 1), (name, min_versions, 2)):
        if type(value) is not int or value < least:
            raise InvalidArgumentError(argument, value, f"Pass an integer of {least} or more")
