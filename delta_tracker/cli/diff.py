"""``diff``: show the rows of a table that differ between two versions, and by how much."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch
from torch import Tensor

from delta_tracker.cli.output import table
from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.text import count, plain, several
from delta_tracker.cli.versions import bytes_to_read, check_tables, contents_of, mapped, write_owners, write_rows
from delta_tracker.errors import InvalidArgumentError, StorageError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.stream.format.manifest import DenseSpec, Manifest
from delta_tracker.stream.reading.path import path_to
from delta_tracker.types import TableSpec

_CHUNK_BYTES = 4 << 20
_MAX_NAMES = 20

_HELP = """Show the rows of a table that differ between versions V1 and V2, and by how much.

A row differs if any of its bits differs. "moved" is the L2 norm of the difference, computed in float64. Rows with NaN
or infinity have the value "nan" or "inf" and are listed first. Both versions are built in the directory for temporary
files (TMPDIR). This needs disk space for two copies of the table, and little memory. After a promotion, the versions of
the former stream can be compared too.

\b
Examples:
  delta-tracker diff file:///streams/ctr 120 121 --table ec.embeddings.user
  delta-tracker diff s3://bucket/ctr 1 500 --table ec.embeddings.user --limit 100 --json
  delta-tracker diff s3://bucket/ctr 120 121 --table mc_ec.embeddings.item --ids
"""


@click.command("diff", help=_HELP)
@stream_command
@click.argument("v1", type=click.IntRange(0))
@click.argument("v2", type=click.IntRange(0))
@click.option("--table", "fqn", metavar="T", help="Name of the table; optional if there is only one.")
@click.option("--limit", default=20, type=click.IntRange(0), help="Number of rows to list, largest move first.")
@click.option("--ids", "shows_ids", is_flag=True, help="Compare the raw ids of the rows instead of their values.")
def command(stream: Stream, v1: int, v2: int, *, fqn: str | None, limit: int, shows_ids: bool) -> int:
    """Compare the two versions of the table and print the differences."""
    stream.newest_readable()
    paths = path_to(stream.log, v1, of_any=True), path_to(stream.log, v2, of_any=True)
    spec = _table(fqn, paths[0][0])
    if shows_ids:
        return _show_ids(stream, (v1, v2), paths, spec, limit)
    with _scratch() as scratch:
        before, after = _both(stream, paths, spec, scratch)
        ids, moved = _compare(before, after)
        order = moved.nan_to_num(math.inf, math.inf).argsort(descending=True, stable=True)[:limit]
        farthest = [
            (row, distance, _length(before[row]), _length(after[row]))
            for row, distance in zip(ids[order].tolist(), moved[order].tolist(), strict=True)
        ]
    summary = _summary(moved)
    if stream.out.is_json:
        keys = ("row", "moved", "length_before", "length_after")
        stream.out.json(
            {"url": stream.storage.url, "table": spec.fqn, "from": v1, "to": v2, "rows": spec.num_rows}
            | {"changed": len(ids), "moved": {name: _finite(value) for name, value in summary.items()}}
            | {"farthest": [dict(zip(keys, [row, *map(_finite, rest)], strict=True)) for row, *rest in farthest]}
        )
        return 0
    share = len(ids) / max(1, spec.num_rows)
    stream.out.line(f"{count(len(ids))} of {count(spec.num_rows)} rows of {spec.fqn} differ ({share:.2%})", "bold")
    if summary:
        stream.out.line("moved by: " + ", ".join(f"{name} {value:.4g}" for name, value in summary.items()))
    if farthest:
        rows = [(str(row), *(f"{value:.4g}" for value in rest)) for row, *rest in farthest]
        stream.out.show(table((">row", ">moved by", f">length at {v1}", f">length at {v2}"), rows))
    return 0


def _show_ids(
    stream: Stream, versions: tuple[int, int], paths: tuple[list[Manifest], list[Manifest]], spec: TableSpec, limit: int
) -> int:
    """Print the rows of a table whose raw ids differ between two versions.

    Raises:
        click.UsageError: if the table has no raw ids.
    """
    if any(spec.fqn not in path[0].identities for path in paths):
        raise click.UsageError(plain(f"Table {spec.fqn} has no raw ids. Omit --ids."))
    with _scratch() as scratch:
        before, after = _both(stream, paths, spec, scratch, with_ids=True)
        (ids,) = (before != after).nonzero(as_tuple=True)
        shown = ids[:limit]
        rows = [
            (row, *(None if each == NO_OWNER else each for each in owners))
            for row, *owners in torch.stack([shown, before[shown], after[shown]], 1).tolist()
        ]
    if stream.out.is_json:
        stream.out.json(
            {"url": stream.storage.url, "table": spec.fqn, "from": versions[0], "to": versions[1]}
            | {"rows": spec.num_rows, "changed": len(ids)}
            | {"owners": [dict(zip(("row", "before", "after"), row, strict=True)) for row in rows]}
        )
        return 0
    stream.out.line(f"{count(len(ids))} of {count(spec.num_rows)} rows of {spec.fqn} have another raw id", "bold")
    if rows:
        heads = (">row", f">raw id at {versions[0]}", f">raw id at {versions[1]}")
        stream.out.show(table(heads, [["none" if each is None else str(each) for each in row] for row in rows]))
    return 0


@contextmanager
def _scratch() -> Iterator[Path]:
    """Context manager that creates a temporary directory, and deletes it at the end of the ``with`` statement.

    Raises:
        InvalidArgumentError: if the directory cannot be created, or a file in it cannot be written, for example because
            the disk is full. An ``OSError`` inside the ``with`` statement is converted to this error, unless it is a
            ``StorageError``.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="delta-tracker-") as scratch:
            yield Path(scratch)
    except StorageError:
        raise
    except OSError as error:
        remedy = f"Set it to a directory with space for two copies of the table: {error.strerror}"
        raise InvalidArgumentError("TMPDIR", tempfile.gettempdir(), remedy) from error


def _table(fqn: str | None, manifest: Manifest) -> TableSpec:
    """Return the spec of the table ``fqn`` in a snapshot; if ``fqn`` is None, the spec of the only table.

    Raises:
        InvalidArgumentError: if the snapshot has no table ``fqn``.
        click.UsageError: if ``fqn`` is None and the snapshot does not have exactly one table.
    """
    names = sorted(manifest.tables)
    if fqn is None and len(names) == 1:
        return manifest.tables[names[0]]
    if fqn is None:
        known = f"{' or '.join(f'--table {name}' for name in names[:_MAX_NAMES])}{' ...' * (len(names) > _MAX_NAMES)}"
        raise click.UsageError(plain(f"The stream has {several(len(names), 'table')}. Pass {known or 'another URL'}."))
    if fqn not in manifest.tables:
        known = f"{', '.join(names[:_MAX_NAMES])}{' ...' * (len(names) > _MAX_NAMES)}"
        raise InvalidArgumentError("--table", fqn, f"Pass a table of version {manifest.version}: {known or 'none'}")
    return manifest.tables[fqn]


def _both(
    stream: Stream,
    paths: tuple[list[Manifest], list[Manifest]],
    spec: TableSpec,
    scratch: Path,
    *,
    with_ids: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the rows that the table has at each of the two versions, or their raw ids.

    If the second path begins with all entries of the first path, these entries are read only once.

    Args:
        stream: the stream.
        paths: for each of the two versions, the entries from a snapshot to the version.
        spec: the table.
        scratch: directory for the files of the memory-mapped tensors.
        with_ids: True to return the raw ids, for a table that has them.

    Returns:
        All rows at the first version and all rows at the second, each ``[rows, columns]`` in the table's dtype; or
        their raw ids, each ``[rows]`` int64.

    Raises:
        MalformedError: if the table's shape or dtype differs between entries.
        CorruptPartError, StorageError: if an entry's parts cannot be read.
        OSError: if the disk is full.
    """
    first, second = paths
    room = DenseSpec(torch.int64, (spec.num_rows,)) if with_ids else DenseSpec(spec.dtype, (spec.num_rows, spec.dim))
    write = write_owners if with_ids else write_rows
    num_shared = len(first) if [each.link for each in second[: len(first)]] == [each.link for each in first] else 0
    with stream.reading("reading", bytes_to_read([*first, *second[num_shared:]], [spec.fqn])):

        def put(manifests: list[Manifest], held: Tensor | None, name: str) -> Tensor:
            for manifest in manifests:
                check_tables(manifest, [spec.fqn], first[0])
                contents = contents_of(stream.storage, manifest, [spec.fqn])
                if held is None:  # allocate only after the table was checked
                    held = mapped(scratch / name, {spec.fqn: room})[spec.fqn]
                write(contents, {spec.fqn: held})
            assert held is not None, "a path is not empty"
            return held

        before = put(first, None, "first")
        if not num_shared:
            return before, put(second, None, "second")
        after = mapped(scratch / "second", {spec.fqn: room})[spec.fqn].copy_(before)
        return before, put(second[num_shared:], after, "second")


def _compare(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Compare two versions of a table.

    Returns:
        Two tensors ``[N]`` for the ``N`` rows that differ in any bit: the int64 ids of the rows, and the float64 L2
        norms of the differences.
    """
    bits = {2: torch.int16, 4: torch.int32}[before.element_size()]
    ids, moved = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.float64)]
    num_rows = max(1, _CHUNK_BYTES // (before.shape[1] * before.element_size()))
    for begin in range(0, len(before), num_rows):
        one, other = before[begin : begin + num_rows], after[begin : begin + num_rows]
        (changed,) = (one.view(bits) != other.view(bits)).any(1).nonzero(as_tuple=True)
        ids.append(changed + begin)
        moved.append((other[changed].double() - one[changed].double()).norm(dim=1))
    return torch.cat(ids), torch.cat(moved)


def _summary(moved: Tensor) -> dict[str, float]:
    if not len(moved):
        return {}
    ordered = moved.sort().values
    found = {f"p{percent}": float(ordered[(len(ordered) - 1) * percent // 100]) for percent in (50, 90, 99)}
    return {"mean": float(moved.mean()), **found, "max": float(ordered[-1])}


def _length(row: Tensor) -> float:
    return float(row.double().norm())


def _finite(value: float) -> float | None:
    """Return ``value``; None if it is NaN or infinite, because JSON does not support such numbers."""
    return value if math.isfinite(value) else None
