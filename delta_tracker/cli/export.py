"""``export``: write the tables of one version to files that other programs can read."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import click
from torch import Tensor

from delta_tracker.cli.stream_command import Stream, os_errors_of, stream_command
from delta_tracker.cli.text import size
from delta_tracker.cli.version_tables import mapped, rows_spec, write_versions
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.stream.format.manifest import DenseSpec
from delta_tracker.stream.format.part_writer import METADATA_KEY, safetensors_header
from delta_tracker.stream.reading.path import path_to

_HELP = """Write the tables and dense tensors of one version.

\b
--out DIR  DIR is a new directory with one file per table,
           <table>.weight.safetensors with the tensor <table>.weight,
           and dense.safetensors if the stream has dense tensors.
           A table with managed collisions also has <table>.raw_ids,
           the raw id of each row, 2**63 - 1 for none
--dcp DIR  DIR is a new checkpoint that plain TorchRec loads with dcp.load
           into {"model": model.state_dict(),
           "optimizer": model.fused_optimizer.state_dict()}.
           "optimizer" has the states of the fused optimizers; it is
           missing if the version has none. Rank 0's states are under
           "training_state"; load them with a call of their own

The version is built under a temporary name next to --out or --dcp and renamed at the end, so that it is never partial.
Needs disk space for the tables (for two copies with --dcp), and little memory. Never overwrites an existing file.

\b
Examples:
  delta-tracker export file:///streams/ctr --out ctr-newest
  delta-tracker export s3://bucket/ctr --version 120 --out ctr-120
  delta-tracker export s3://bucket/recovery --dcp checkpoint
"""


@click.command("export", help=_HELP)
@stream_command
@click.option("--version", type=click.IntRange(0), help="Version to export.  [default: newest]")
@click.option("--out", type=click.Path(path_type=Path), help="New directory of safetensors files; must not exist.")
@click.option("--dcp", type=click.Path(path_type=Path), help="New directory of a DCP checkpoint; must not exist.")
def command(stream: Stream, version: int | None, out: Path | None, dcp: Path | None) -> int:
    """Export a version to a new directory, which gets its final name when it is complete."""
    option, out, form = _destination(out, dcp)
    stream.check_exists()
    version = stream.head().version if version is None else version
    _refuse_existing(option, out)
    errors = os_errors_of(option, str(out))
    with errors, tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as draft:
        work, made = Path(draft) / "work", Path(draft) / "made"
        work.mkdir()
        stream_id = _write(stream, version, form, made, work)
        files = sorted(made.iterdir())
        for each in (*files, made):
            _sync(each)
        num_bytes = sum(each.stat().st_size for each in files)
        _refuse_existing(option, out)
        made.rename(out)
    names = [each.name for each in files]
    stream.out.json(
        {"url": stream.storage.url, "stream": stream_id, "version": version, "format": form}
        | {"out": str(out), "files": names, "bytes": num_bytes}
    )
    stream.out.line(f"wrote version {version} to {out}, {size(num_bytes)}")
    for name in names:
        stream.out.line(f"  {name}")
    return 0


def _destination(out: Path | None, dcp: Path | None) -> tuple[str, Path, str]:
    """Return the option that was passed, its path, and the format that it selects."""
    if dcp is not None and out is not None:
        raise InvalidArgumentError("--out", str(out), "Omit it: --dcp has its own path and format")
    if dcp is not None:
        return "--dcp", dcp, "dcp"
    if out is None:
        raise click.UsageError("Pass --out or --dcp.")
    return "--out", out, "safetensors"


def _refuse_existing(option: str, out: Path) -> None:
    if os.path.lexists(out):
        raise InvalidArgumentError(option, str(out), "Choose another name: it exists")


def _write(stream: Stream, version: int, form: str, made: Path, work: Path) -> str:
    """Write a version to the new directory ``made``. Temporary files are written to ``work``. Return the stream id."""
    if form == "dcp":
        from delta_tracker.cli.dcp_checkpoint import entries_of, write_checkpoint  # noqa: PLC0415  slow to import

        path = entries_of(stream.log, version)
        with stream.out.progress("reading", sum(each.num_bytes for each in path)) as advance:
            write_checkpoint(stream.storage, path, made, work, advance)
        return path[-1].stream
    path = path_to(stream.log, version, of_any=True)
    snapshot, metadata = path[0], {"stream": path[0].stream, "version": str(version)}
    made.mkdir()
    rooms: dict[str, Tensor] = {}
    for fqn, spec in snapshot.tables.items():
        specs = {_weight(fqn): rows_spec(spec)}
        if fqn in snapshot.identities:  # first, because its items are the widest
            specs = {_raw_ids(fqn): DenseSpec("int64", (spec.num_rows,)), **specs}
        file = made / f"{quote(_weight(fqn), safe='')}.safetensors"
        rooms |= mapped(file, specs, safetensors_header(specs.items(), metadata))
    rows = {fqn: rooms[_weight(fqn)] for fqn in snapshot.tables}
    owners = {fqn: rooms[_raw_ids(fqn)] for fqn in snapshot.identities}
    with stream.out.progress("reading", sum(each.num_bytes for each in path)) as advance:
        dense = write_versions(stream.storage, path, rows, owners, like=snapshot, advance=advance)
    if dense:
        _write_dense(made / "dense.safetensors", dense, metadata)
    return path[-1].stream


def _write_dense(file: Path, dense: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    if METADATA_KEY in dense:
        raise InvalidArgumentError("--out", str(file), f"Choose --dcp: a tensor is named {METADATA_KEY}")
    # Largest item size first: in this order, no tensor in the file needs padding.
    ordered = sorted(dense.items(), key=lambda item: -item[1].itemsize)
    specs = {name: DenseSpec(each.dtype, tuple(each.shape)) for name, each in ordered}
    for name, room in mapped(file, specs, safetensors_header(specs.items(), metadata)).items():
        room.copy_(dense[name])


def _weight(fqn: str) -> str:
    return f"{fqn}.weight"


def _raw_ids(fqn: str) -> str:
    return f"{fqn}.raw_ids"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
