"""``export``: write the tables of one version to files that other programs can read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import click
import torch
from torch import Tensor

from delta_tracker.cli.stream_command import Stream, stream_command
from delta_tracker.cli.text import size
from delta_tracker.cli.versions import (
    bytes_to_read,
    check_tables,
    contents_of,
    mapped,
    shape_of,
    write_owners,
    write_rows,
)
from delta_tracker.errors import InvalidArgumentError, StorageError
from delta_tracker.stream.format.manifest import DTYPE_NAMES, DenseSpec, Manifest
from delta_tracker.stream.format.part_writer import ALIGNMENT, SIZE_BYTES
from delta_tracker.stream.reading.path import path_to

_METADATA = "__metadata__"

_HELP = """Write the tables and dense tensors of one version.

\b
--format safetensors  --out is a new directory with one file per table,
                      <table>.weight.safetensors with the tensor <table>.weight,
                      and dense.safetensors if the stream has dense tensors.
                      A table with managed collisions also has <table>.raw_ids,
                      the raw id of each row, 2**63 - 1 for none
--format torch        --out is a new file: a state dict of the same tensors, for
                      torch.load(FILE, weights_only=True)
--dcp DIR             DIR is a new checkpoint that plain TorchRec loads with dcp.load
                      into {"model": model.state_dict(),
                      "optimizer": model.fused_optimizer.state_dict()}.
                      "optimizer" has the states of the fused optimizers; it is
                      missing if the version has none. Rank 0's states are under
                      "training_state"; load them with a call of their own

The version is built under a temporary name next to --out or --dcp and renamed at the end, so that it is never partial.
Needs disk space for the tables (for two copies with torch and --dcp), and little memory. Never overwrites an existing
file.

\b
Examples:
  delta-tracker export file:///streams/ctr --out ctr-newest
  delta-tracker export s3://bucket/ctr --version 120 --format torch --out ctr-120.pt
  delta-tracker export s3://bucket/recovery --dcp checkpoint
"""


@click.command("export", help=_HELP)
@stream_command
@click.option("--version", type=click.IntRange(0), help="Version to export.  [default: newest]")
@click.option("--out", type=click.Path(path_type=Path), help="New file or directory; must not exist.")
@click.option(
    "--format", "form", type=click.Choice(["safetensors", "torch"]), help="Format of --out.  [default: safetensors]"
)
@click.option("--dcp", type=click.Path(path_type=Path), help="New directory of a DCP checkpoint; must not exist.")
def command(stream: Stream, version: int | None, out: Path | None, form: str | None, dcp: Path | None) -> int:
    """Write the files in a temporary directory, then rename the result."""
    option, out, form = _destination(out, form, dcp)
    version = stream.head().version if version is None else version
    stream.newest_readable()
    try:
        with _draft(option, out) as draft:
            if form == "dcp":
                path, files = _put_checkpoint_together(stream, version, draft)
            else:
                path, files = _put_together(stream, version, draft, form)
            num_bytes = sum(each.stat().st_size for each in files)
            _refuse_existing(option, out)
            (files[0] if form == "torch" else files[0].parent).rename(out)
    except StorageError:
        raise
    except OSError as error:
        raise InvalidArgumentError(option, str(out), f"Choose another path: {error.strerror}") from error
    names = [] if form == "torch" else sorted(each.name for each in files)
    if stream.out.is_json:
        stream.out.json(
            {"url": stream.storage.url, "stream": path[-1].stream, "version": version, "format": form}
            | {"out": str(out), "files": names, "bytes": num_bytes}
        )
        return 0
    stream.out.line(f"wrote version {version} to {out}, {size(num_bytes)}")
    for name in names:
        stream.out.line(f"  {name}")
    return 0


def _destination(out: Path | None, form: str | None, dcp: Path | None) -> tuple[str, Path, str]:
    """Return the option with the path to write, the path, and the format."""
    if dcp is not None and (out is not None or form is not None):
        argument, value = ("--format", form) if out is None else ("--out", str(out))
        raise InvalidArgumentError(argument, value, "Omit it: --dcp has its own path and format")
    if dcp is not None:
        return "--dcp", dcp, "dcp"
    if out is None:
        raise click.UsageError("Pass --out or --dcp.")
    return "--out", out, form or "safetensors"


@contextmanager
def _draft(option: str, out: Path) -> Iterator[Path]:
    """Yield a temporary directory next to ``out`` that is deleted at the end of the ``with`` statement.

    Raises:
        InvalidArgumentError: if ``out`` exists.
        OSError: if the directory cannot be created.
    """
    _refuse_existing(option, out)
    draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _refuse_existing(option: str, out: Path) -> None:
    if os.path.lexists(out):
        raise InvalidArgumentError(option, str(out), "Choose another name: it exists")


def _put_together(stream: Stream, version: int, draft: Path, form: str) -> tuple[list[Manifest], list[Path]]:
    """Write the files of a version, and return the entries that lead to it and the paths of the files.

    Args:
        stream: the stream.
        version: version to export.
        draft: existing directory for the files.
        form: ``safetensors`` or ``torch``.

    Raises:
        InvalidArgumentError: if the version is not committed yet, or the format does not support the name of a tensor.
        MalformedError: if the spec of a table differs between the snapshot and a later version.
        MissingVersionError, NoSnapshotError, CorruptPartError, StorageError: if the version cannot be read.
        OSError: if a file cannot be written.
    """
    path = path_to(stream.log, version, of_any=True)
    work = draft / "work"
    work.mkdir()
    rooms: dict[str, Tensor] | None = None
    dense: dict[str, Tensor] = {}
    with stream.reading("reading", bytes_to_read(path)):
        for manifest in path:
            contents = contents_of(stream.storage, manifest)
            if rooms is None:  # allocate only after the contents were checked
                rooms = _rooms(manifest, version, work, form)
            check_tables(manifest, manifest.tables, path[0])
            write_rows(contents, {fqn: rooms[_weight(fqn)] for fqn in path[0].tables})
            write_owners(contents, {fqn: rooms[_raw_ids(fqn)] for fqn in path[0].identities})
            dense |= {name: tensor.clone() for name, tensor in contents.dense.items()}
    assert rooms is not None, "a path is not empty"
    if form == "safetensors":
        if dense:
            specs = {name: DenseSpec(each.dtype, tuple(each.shape)) for name, each in _widest_first(dense)}
            for name, room in _safetensors(work / "dense.safetensors", specs, path[0].stream, version).items():
                room.copy_(dense[name])
        files = sorted(work.iterdir())
    else:
        files = [draft / "state.pt"]
        with stream.out.progress("writing", None):
            torch.save(_state_dict(rooms, dense), files[0])
    for file in (*files, work):
        _sync(file)
    return path, files


def _put_checkpoint_together(stream: Stream, version: int, draft: Path) -> tuple[list[Manifest], list[Path]]:
    """Write a DCP checkpoint of a version, and return the entries that lead to it and the paths of its files.

    Raises the errors of :func:`~delta_tracker.cli.dcp_checkpoint.entries_of` and of
    :func:`~delta_tracker.cli.dcp_checkpoint.write_checkpoint`.
    """
    from delta_tracker.cli.dcp_checkpoint import entries_of, write_checkpoint  # noqa: PLC0415  slow to import

    path = entries_of(stream.log, version)
    directory, work = draft / "checkpoint", draft / "work"
    work.mkdir()
    with stream.reading("reading", bytes_to_read(path)):
        write_checkpoint(stream.storage, path, directory, work)
    files = sorted(directory.iterdir())
    for file in (*files, directory):
        _sync(file)
    return path, files


def _rooms(snapshot: Manifest, version: int, work: Path, form: str) -> dict[str, Tensor]:
    """Create one file per table and return the memory-mapped tensors by name. The caller must write the rows.

    Args:
        snapshot: manifest with the specs of the tables.
        version: version to store in the metadata of safetensors files.
        work: directory for the files.
        form: ``safetensors`` or ``torch``.
    """
    rooms: dict[str, Tensor] = {}
    for number, (fqn, spec) in enumerate(snapshot.tables.items()):
        key = _weight(fqn)
        specs = {key: DenseSpec(spec.dtype, shape_of(spec))}
        if fqn in snapshot.identities:  # first, because its items are the widest
            specs = {_raw_ids(fqn): DenseSpec(torch.int64, (spec.num_rows,)), **specs}
        if form == "safetensors":
            file = work / f"{quote(key, safe='')}.safetensors"
            rooms |= _safetensors(file, specs, snapshot.stream, version)
        else:
            rooms |= mapped(work / str(number), specs)
    return rooms


def _weight(fqn: str) -> str:
    return f"{fqn}.weight"


def _raw_ids(fqn: str) -> str:
    return f"{fqn}.raw_ids"


def _safetensors(file: Path, specs: Mapping[str, DenseSpec], stream: str, version: int) -> dict[str, Tensor]:
    """Create a safetensors file and return its memory-mapped tensors by name. The caller must write the values.

    Args:
        file: path of the new file.
        specs: name to spec of each tensor, in the order in which the file stores the tensors.
        stream: stream id to store in the metadata.
        version: version to store in the metadata.

    Raises:
        InvalidArgumentError: if a tensor has the reserved name ``__metadata__``.
        OSError: if the disk is full, or the file cannot be written.
    """
    if _METADATA in specs:
        raise InvalidArgumentError("--format", "safetensors", f"Choose torch: a tensor is named {_METADATA}")
    header: dict[str, object] = {_METADATA: {"stream": stream, "version": str(version)}}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.num_bytes
        header[name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % ALIGNMENT)
    return mapped(file, specs, len(head).to_bytes(SIZE_BYTES, "little") + head)


def _widest_first(dense: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) pairs, largest item size first. In this order, no tensor in the file needs padding."""
    return sorted(dense.items(), key=lambda item: -item[1].itemsize)


def _state_dict(tables: Mapping[str, Tensor], dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for name in dense.keys() & tables.keys():
        raise InvalidArgumentError("--format", "torch", f"Choose safetensors: a table and a dense tensor are {name!r}")
    return {**tables, **dense}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
