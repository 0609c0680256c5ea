"""Compaction merges several deltas into one delta or into a snapshot, so that readers read fewer bytes.

A merged entry is stored outside the log. It is created after its parts, and only if no entry with its name exists.
Therefore, any process may compact at any time.

The newest value of each row and column range is kept. The stored bytes of overlapping blocks are copied if the blocks
have the same encoding and columns. Otherwise, the rows are decoded and split at every column edge. In both cases,
readers get bitwise identical values.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from delta_tracker.arguments import check_count
from delta_tracker.errors import CorruptPartError, InvalidArgumentError, MalformedError, StorageError
from delta_tracker.stream.format.block_rows import BlockRows, Column, Overlay, WholeBlocks, read_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import (
    FORMAT,
    STATES_FORMAT,
    Block,
    DenseSpec,
    Manifest,
    Merged,
    Part,
    Schema,
    entry_name,
)
from delta_tracker.stream.format.part_reader import PartReader, dense_of, read_parts
from delta_tracker.stream.format.part_writer import put_part
from delta_tracker.stream.format.table_choice import check_has_all
from delta_tracker.stream.log import StreamLog, generation_error, part_name
from delta_tracker.stream.maintenance.retention import ORPHAN_SECONDS
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec

DEFAULT_MAX_BYTES = 1 << 30
_ID_BYTES = 8

_Dense = dict[str, Tensor]
_Shape = tuple[tuple[int, int], Encoding]  # columns and encoding of a block


def compact(
    stream: Storage | StreamLog,
    *,
    fold: float = 0.5,
    max_bytes: int = DEFAULT_MAX_BYTES,
    min_versions: int = 2,
    now: Callable[[], float] = time.time,
) -> Manifest | None:
    """Merge the deltas after the newest snapshot into a larger delta, or fold them into a new snapshot.

    The new snapshot has the same blocks as the old snapshot, with newer values of their rows. Newer rows with another
    encoding or other columns are stored as additional blocks.

    Args:
        stream: store or log of the stream.
        fold: fraction of the newest snapshot's size. If the deltas to merge reach this size, a snapshot is created.
        max_bytes: maximum size in bytes of the versions in memory. Versions that do not fit are merged by later calls.
        min_versions: minimum number of unmerged deltas. If there are fewer, no delta is created, and only merged deltas
            count towards ``fold``.
        now: function that returns the Unix time in seconds.

    Returns:
        The merged entry, even if another process created it first; None if there is nothing to merge, or if retention
        deleted some of the entries during the call.

    Raises:
        MalformedError, CorruptPartError: if an entry or a part is invalid; nothing was merged.
        StorageError: if the store fails, or is so slow that retention may have deleted the parts of the merged entry.
    """
    if type(fold) not in (int, float) or not 0 < fold < float("inf"):
        raise InvalidArgumentError("fold", fold, "Pass a positive fraction of the snapshot's bytes, such as 0.5")
    for argument, value, least in (("max_bytes", max_bytes, 1), ("min_versions", min_versions, 2)):
        check_count(argument, value, least)
    log = stream if isinstance(stream, StreamLog) else StreamLog(stream)
    base = log.newest_snapshot()
    if base is None:
        return None
    check_has_all(log.storage)
    pieces = _pieces(log, base)
    compaction = _Compaction(log, base, max_bytes, now)
    versions: Sequence[Manifest] = ()
    try:
        # Count the deltas after the fold as well. Otherwise deltas that never fit together would accumulate.
        versions = _run(pieces, max_bytes - _listed_bytes(base))
        is_due = _num_new(versions) >= min_versions
        num_bytes = sum(_size(piece) for piece in pieces if is_due or piece.merges is not None)
        own = _owned_encodings(base)
        is_alike = _schema(versions) == base.schema and all(_is_alike(_owned_encodings(each), own) for each in versions)
        if versions and num_bytes >= fold * _size(base) and is_alike:
            behind = sum(_size(piece) for piece in pieces[len(versions) :])
            return compaction.merge(versions, fold_bytes=fold * _size(base) - behind if is_due else 0)
        for start in range(len(pieces)):
            versions = _run(pieces[start:], max_bytes)
            if _num_new(versions) >= min_versions:
                return compaction.merge(versions)
    except CorruptPartError:
        newest = log.newest_snapshot()
        is_newest = newest is not None and newest.link == base.link
        if is_newest and all(_is_there(log, version) for version in (base, *versions)):
            raise
        # Retention deleted a version during this call, because a newer snapshot supersedes it.
    return None


class _Compaction:
    """Builder of one merged entry after the newest snapshot, ``base``."""

    def __init__(self, log: StreamLog, base: Manifest, max_bytes: int, now: Callable[[], float]) -> None:
        self._log = log
        self._base = base
        self._max_bytes = max_bytes
        self._now = now
        self._started = now()

    def merge(self, versions: Sequence[Manifest], *, fold_bytes: float = float("inf")) -> Manifest | None:
        """Merge ``versions``, oldest first, into a delta.

        If the delta would have ``fold_bytes`` or more, merges ``versions`` and the newest snapshot into a new snapshot.
        """
        draft = _delta(versions)
        rows, dense = self._read(versions)
        if fold_bytes > 0:
            merged = list(_newest_rows(rows, draft.tables))
            if sum(each.num_bytes for each in merged) + sum(each.nbytes for each in dense.values()) < fold_bytes:
                return self._create(draft, self._put(draft, merged, dense), dense)
        draft = replace(_delta([self._base, *versions]), kind="snapshot", parent=None, snapshot=draft.version)
        newest = list(_newest_rows([*self._listed(), *rows], draft.tables))
        parts, base_dense = self._write_over(draft, Overlay(newest))
        blocks = WholeBlocks(block for part in self._base.parts for block in part.blocks if block.ids == "all")
        outside = [left for each in newest for left in blocks.outside(each) if left.block.num_rows]
        dense = base_dense | dense
        return self._create(draft, [*parts, *self._put(draft, outside, dense)], dense)

    def _read(self, versions: Sequence[Manifest]) -> tuple[list[BlockRows], _Dense]:
        rows: list[BlockRows] = []
        dense: _Dense = {}
        for version in versions:
            parts = read_parts(self._log.storage, version, memory_bytes=self._max_bytes)
            # Listed rows are newer than the rows of a whole block of the same version.
            for of_whole_blocks in (True, False):
                rows += [each for part in parts for each in _loaded_rows(part, of_whole_blocks=of_whole_blocks)]
            dense |= dense_of(parts)
        return rows, dense

    def _listed(self) -> Iterator[BlockRows]:
        for part in self._base.parts:
            if any(block.ids != "all" for block in part.blocks):
                # Do not hold the part in memory: the yielded rows are copies.
                yield from _loaded_rows(PartReader(self._log.storage, part, self._base, memory_bytes=0))

    def _write_over(self, draft: Manifest, overlay: Overlay) -> tuple[list[Part], _Dense]:
        parts: list[Part] = []
        dense: _Dense = {}
        for part in self._base.parts:
            has_whole = any(block.ids == "all" for block in part.blocks)
            if not has_whole and not part.dense:
                continue  # _listed() has read it
            reader = PartReader(self._log.storage, part, self._base)
            dense |= {name: tensor.clone() for name, tensor in reader.dense().items()}
            if has_whole:
                parts += self._put(draft, [overlay.over(rows) for rows in reader.with_states() if rows.ids is None], {})
        return parts, dense

    def _put(self, draft: Manifest, rows: Sequence[BlockRows], dense: _Dense) -> list[Part]:
        """Write rows, their states and dense tensors to a new part. Return its record in a list; ``[]`` if empty."""
        if not rows and not dense:
            return []
        name, states_name = (part_name(draft.version, draft.generation, author) for author in ("c", "cs"))
        has_states = draft.format == STATES_FORMAT
        return [put_part(self._log.storage, name, rows, dense, states_name=states_name if has_states else None)]

    def _create(self, draft: Manifest, parts: Sequence[Part], dense: _Dense) -> Manifest | None:
        specs = {name: DenseSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in dense.items()}
        draft = replace(draft, created=self._now(), dense=specs, parts=tuple(parts))
        seconds = self._now() - self._started
        if seconds > ORPHAN_SECONDS / 2:
            reason = (
                f"a compaction took {seconds:.0f} s; parts without an entry are deleted after {ORPHAN_SECONDS:.0f} s"
            )
            remedy = "Compact more often, or on a host with a faster connection, so that it takes less time"
            raise StorageError(self._log.storage.url, reason, remedy)
        # After a power loss, no merged entry may replace versions that are not in the log.
        self._log.storage.sync("log")
        if not self._log.create_merged(draft):
            for each in draft.objects:
                if each not in draft.training:
                    self._log.storage.delete(each.name)
        return self._log.read_merged(Merged.of(draft))


def _delta(versions: Sequence[Manifest]) -> Manifest:
    """Return the manifest of the delta that merges ``versions``, without parts."""
    last, newest = versions[-1], [version for version in versions if version.kind != "claim"]
    return replace(
        newest[-1],
        generation=last.generation,
        writer=last.writer,
        version=last.version,
        kind="delta",
        parent=versions[0].parent,
        snapshot=last.snapshot,
        # A trainer that resumed from a checkpoint continues at an earlier step.
        batches=(min(version.batches[0] for version in newest), newest[-1].batches[1]),
        owner_changes={},
        merges=last.link,
    )


def _pieces(log: StreamLog, base: Manifest) -> list[Manifest]:
    """Return the entries after ``base``, up to the next snapshot (exclusive) or the head."""
    # Sorted by end, so the longest one per first version is kept.
    merged = {each.first: each for each in log.merged(after=base.version) if each.kind == "delta"}
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
        if piece.generation < held.generation:
            raise generation_error(piece, held)
        pieces.append(piece)
        held = piece


def _run(pieces: Sequence[Manifest], max_bytes: int) -> list[Manifest]:
    """Return the longest prefix with one schema that fits ``max_bytes``; empty if it contains only claims."""
    run: list[Manifest] = []
    encodings: dict[str, Encoding] = {}  # of the tables with raw ids in ``run``
    num_bytes = 0
    for piece in pieces:
        # Ids stored as gaps take 8 bytes each in memory.
        num_bytes += _size(piece) + _ID_BYTES * piece.num_rows
        if num_bytes > max_bytes or (piece.kind != "claim" and piece.schema != _schema([*run, piece])):
            break
        owned = _owned_encodings(piece)
        if not _is_alike(owned, encodings):
            break
        encodings |= owned
        run.append(piece)
    return run if any(piece.kind != "claim" for piece in run) else []


def _schema(versions: Sequence[Manifest]) -> Schema:
    return next((version.schema for version in versions if version.kind != "claim"), (FORMAT, {}, {}, {}))


def _is_alike(new: Mapping[str, Encoding], held: Mapping[str, Encoding]) -> bool:
    """Return True if tables in both mappings have the same encoding, so that rows can be merged without decoding."""
    return all(held.get(fqn, encoding) is encoding for fqn, encoding in new.items())


def _owned_encodings(version: Manifest) -> dict[str, Encoding]:
    if not version.identities:
        return {}
    blocks = (block for part in version.parts for block in part.blocks)
    return {block.table: block.encoding for block in blocks if block.table in version.identities}


def _size(version: Manifest) -> int:
    return version.total_bytes - sum(each.num_bytes for each in version.training)


def _listed_bytes(version: Manifest) -> int:
    """Return the memory in bytes of a version's listed rows, with their ids, states and owners."""
    num_bytes = 0
    for block in (block for part in version.parts for block in part.blocks if block.ids != "all"):
        states = version.states.get(block.table)
        row_bytes = block.row_bytes + _ID_BYTES * (1 + (block.table in version.identities))
        for state in () if states is None else states.states:
            row_bytes += state.dtype.itemsize * (block.num_columns if state.width == "columns" else 1)
        num_bytes += block.num_rows * row_bytes
    return num_bytes


def _num_new(versions: Sequence[Manifest]) -> int:
    return sum(version.kind == "delta" and version.merges is None for version in versions)


def _is_there(log: StreamLog, version: Manifest) -> bool:
    found = log.read(version.version) if version.merges is None else log.read_merged(Merged.of(version))
    # A deleted merged entry may have been created again with other parts.
    return found is not None and found.xxh3 == version.xxh3


def _loaded_rows(part: PartReader, *, of_whole_blocks: bool = False) -> list[BlockRows]:
    if all((block.ids == "all") != of_whole_blocks for block in part.part.blocks):
        return []  # without a read of the states
    found = [each for each in part.with_states() if (each.ids is None) == of_whole_blocks and each.block.num_rows]
    if of_whole_blocks:
        found = [each.take(torch.arange(each.block.num_rows)) for each in found]
    return [each.loaded() for each in found]


def _newest_rows(rows: Iterable[BlockRows], tables: Mapping[str, TableSpec]) -> Iterator[BlockRows]:
    """Yield the newest rows of each table, in column ranges that do not overlap. Values are gathered lazily.

    ``rows`` are listed rows in memory, oldest first. All blocks of a table with states have the table's encoding, and
    column ranges that are equal or do not overlap. All blocks of a table with owners have one encoding and all columns.
    """
    rows_of: dict[str, list[BlockRows]] = {}
    for each in rows:
        rows_of.setdefault(each.block.table, []).append(each)
    for fqn, held in rows_of.items():
        shapes = {(each.block.columns, each.block.encoding) for each in held}
        for columns, encoding in _column_ranges(shapes, Encoding.of(tables[fqn].dtype)):
            first, end = columns
            sources = [each for each in held if each.block.columns[0] <= first and end <= each.block.columns[1]]
            yield _newest(tables[fqn], columns, encoding, sources)


def _column_ranges(shapes: Collection[_Shape], own: Encoding) -> Iterator[_Shape]:
    """Yield disjoint column ranges that cover ``shapes``, split where these overlap, with the encoding ``own``."""
    groups: list[list[_Shape]] = []
    covered = 0  # end of the columns of the groups
    for shape in sorted(shapes):
        first, end = shape[0]
        if first >= covered:
            groups.append([])
        groups[-1].append(shape)
        covered = max(covered, end)
    for group in groups:
        edges = sorted({edge for columns, _ in group for edge in columns})
        encoding = group[0][1] if len(group) == 1 else own
        yield from ((columns, encoding) for columns in itertools.pairwise(edges))


def _newest(table: TableSpec, columns: tuple[int, int], encoding: Encoding, sources: Sequence[BlockRows]) -> BlockRows:
    listed = [each.ids for each in sources if each.ids is not None]
    ids, order = torch.cat(listed).sort(stable=True)
    is_last = torch.ones_like(ids, dtype=torch.bool)
    is_last[:-1] = ids[1:] != ids[:-1]
    ids, winners = ids[is_last], order[is_last]
    starts = torch.tensor([0, *(len(each) for each in listed)]).cumsum(0)
    source = torch.searchsorted(starts, winners, right=True) - 1
    block = Block(table.fqn, (0, table.num_rows), columns, len(ids), encoding.listed_form, encoding)
    alike = [_shaped(each, columns, encoding, table.dtype) for each in sources]
    return _chosen(block, ids, alike, source, winners - starts[source])


def _chosen(block: Block, ids: Tensor, sources: Sequence[BlockRows], source: Tensor, index: Tensor) -> BlockRows:
    """Return ``N`` rows from several sources, with their states and owners.

    ``ids``, ``source`` and ``index`` are ``[N]``: the ids of the rows, the number of each row's source, and the row's
    index in it. All sources have the same columns and encoding.
    """

    def read(column: Column, begin: int, end: int) -> Tensor:
        chosen, indices = source[begin:end], index[begin:end]
        like = sources[0].reader(column)(0, 0)
        out = like.new_empty(end - begin, like.shape[1])
        for number in set(chosen.tolist()):
            wanted = (chosen == number).nonzero()[:, 0]
            out.index_copy_(0, wanted, read_rows(sources[number].reader(column), indices[wanted]))
        return out

    states = tuple(partial(read, state) for state in range(len(sources[0].states)))
    owners = None if sources[0].owners is None else partial(read, "owners")
    return BlockRows(block, ids, partial(read, "values"), states, owners)


def _shaped(rows: BlockRows, columns: tuple[int, int], encoding: Encoding, dtype: torch.dtype) -> BlockRows:
    if (rows.block.columns, rows.block.encoding) == (columns, encoding):
        return rows
    assert not rows.states, "rows with states have equal column ranges and encodings"
    assert rows.owners is None, "rows with owners have equal encodings and all columns"
    return rows.decoded(dtype).within(rows.block.rows, columns)
