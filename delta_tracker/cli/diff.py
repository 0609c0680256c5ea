"""``diff``: show the rows of a table that differ between two versions, and by how much."""

import math
import tempfile
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from delta_tracker.cli.output import table
from delta_tracker.cli.stream_command import Stream, os_errors_of, stream_command
from delta_tracker.cli.text import count, escaped, plural
from delta_tracker.cli.version_tables import mapped, rows_spec, write_versions
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.rows import bits_of
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
    """Compare a table in the versions ``v1`` and ``v2``, and print the rows that differ."""
    stream.check_exists()
    paths = path_to(stream.log, v1, of_any=True), path_to(stream.log, v2, of_any=True)
    spec = _table(fqn, paths[0][0])
    if shows_ids and any(spec.fqn not in path[0].identities for path in paths):
        raise click.UsageError(escaped(f"Table {spec.fqn} has no raw ids. Omit --ids."))
    remedy = "Set it to a directory with space for two copies of the table"
    errors = os_errors_of("TMPDIR", tempfile.gettempdir(), remedy)
    with errors, tempfile.TemporaryDirectory(prefix="delta-tracker-") as scratch:
        before, after = _both(stream, paths, spec, Path(scratch), with_ids=shows_ids)
        found = (_compare_ids if shows_ids else _compare_rows)(before, after, limit)
    about = {"url": stream.storage.url, "table": spec.fqn, "from": v1, "to": v2, "rows": spec.num_rows}
    stream.out.json(about | found)
    changed = f"{count(found['changed'])} of {count(spec.num_rows)} rows of {spec.fqn}"
    if shows_ids:
        stream.out.line(f"{changed} have another raw id", "bold")
        columns = [">row", f">raw id at {v1}", f">raw id at {v2}"]
        rows = [["none" if each is None else str(each) for each in row.values()] for row in found["owners"]]
    else:
        stream.out.line(f"{changed} differ ({found['changed'] / max(1, spec.num_rows):.2%})", "bold")
        if found["moved"]:
            stream.out.line("moved by: " + ", ".join(f"{name} {value:.4g}" for name, value in found["moved"].items()))
        columns = [">row", ">moved by", f">length at {v1}", f">length at {v2}"]
        rows = [[str(row), *(f"{value:.4g}" for value in rest)] for row, *rest in map(dict.values, found["farthest"])]
    if rows:
        stream.out.show(table(columns, rows))
    return 0


def _table(fqn: str | None, manifest: Manifest) -> TableSpec:
    """Return the spec of the table ``fqn`` in the snapshot ``manifest``. If ``fqn`` is None, use the only table.

    Raises:
        InvalidArgumentError: if the snapshot does not contain the table ``fqn``.
        click.UsageError: if ``fqn`` is None and the snapshot does not contain exactly one table.
    """
    if fqn is None and len(manifest.tables) == 1:
        return next(iter(manifest.tables.values()))
    names = sorted(manifest.tables)
    rest = " ..." * (len(names) > _MAX_NAMES)
    if fqn is None:
        known = " or ".join(f"--table {name}" for name in names[:_MAX_NAMES]) + rest
        raise click.UsageError(escaped(f"The stream has {plural(len(names), 'table')}. Pass {known or 'another URL'}."))
    if fqn not in manifest.tables:
        known = ", ".join(names[:_MAX_NAMES]) + rest
        raise InvalidArgumentError("--table", fqn, f"Pass a table of version {manifest.version}: {known or 'none'}")
    return manifest.tables[fqn]


def _both(
    stream: Stream, paths: tuple[list[Manifest], list[Manifest]], spec: TableSpec, scratch: Path, *, with_ids: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows of a table in two versions. If ``with_ids`` is True, return the raw ids of the rows instead.

    ``paths`` contains two lists of entries, each from a snapshot to a version. If the second list starts with
    all entries of the first one, these entries are read only once. The results are memory-mapped from files in
    ``scratch``: ``[rows, columns]`` in the table's dtype, or ``[rows]`` int64 raw ids.
    """
    first, second = paths
    held = DenseSpec("int64", (spec.num_rows,)) if with_ids else rows_spec(spec)
    is_shared = [each.link for each in second[: len(first)]] == [each.link for each in first]
    rest = second[len(first) :] if is_shared else second
    rooms: list[Tensor] = []
    with stream.out.progress("reading", sum(each.num_bytes for each in (*first, *rest))) as advance:
        for name, manifests in (("first", first), ("second", rest)):
            room = mapped(scratch / name, {spec.fqn: held})
            if rooms and is_shared:
                room[spec.fqn].copy_(rooms[0])
            rows, owners = ({}, room) if with_ids else (room, {})
            write_versions(stream.storage, manifests, rows, owners, like=first[0], table=spec.fqn, advance=advance)
            rooms.append(room[spec.fqn])
    return rooms[0], rooms[1]


def _compare_ids(before: Tensor, after: Tensor, limit: int) -> dict[str, Any]:
    """Return a JSON object with the number of rows whose raw ids differ, and the first ``limit`` of these rows."""
    (ids,) = (before != after).nonzero(as_tuple=True)
    shown = ids[:limit]
    rows = torch.stack([shown, before[shown], after[shown]], 1).tolist()
    known = [[None if each == NO_OWNER else each for each in row] for row in rows]
    return {"changed": len(ids), "owners": [dict(zip(("row", "before", "after"), row, strict=True)) for row in known]}


def _compare_rows(before: Tensor, after: Tensor, limit: int) -> dict[str, Any]:
    """Return a JSON object with the number of rows that differ, statistics of L2 distances, and the farthest rows."""
    pieces = [(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64))]
    num_rows = max(1, _CHUNK_BYTES // (before.shape[1] * before.element_size()))
    for begin in range(0, len(before), num_rows):
        one, other = before[begin : begin + num_rows], after[begin : begin + num_rows]
        (changed,) = (bits_of(one) != bits_of(other)).any(1).nonzero(as_tuple=True)
        pieces.append((changed + begin, (other[changed].double() - one[changed].double()).norm(dim=1)))
    ids, moved = map(torch.cat, zip(*pieces, strict=True))
    order = moved.nan_to_num(math.inf, math.inf).argsort(descending=True, stable=True)[:limit]
    farthest = [
        {"row": row, "moved": distance, "length_before": _length(before[row]), "length_after": _length(after[row])}
        for row, distance in zip(ids[order].tolist(), moved[order].tolist(), strict=True)
    ]
    return {"changed": len(ids), "moved": _summary(moved), "farthest": farthest}


def _summary(moved: Tensor) -> dict[str, float]:
    if not len(moved):
        return {}
    ordered = moved.sort().values
    found = {f"p{percent}": float(ordered[-(-len(ordered) * percent // 100) - 1]) for percent in (50, 90, 99)}
    return {"mean": float(moved.mean()), **found, "max": float(ordered[-1])}


def _length(row: Tensor) -> float:
    return float(row.double().norm())
