"""Build the tables of a version in memory-mapped files. The tables may be larger than memory."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from delta_tracker.errors import MalformedError
from delta_tracker.predictor.placement import place
from delta_tracker.row_target import TensorTarget
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.manifest import DenseSpec, Manifest, Part
from delta_tracker.stream.log import entry_name
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec

# Maximum bytes of a version's parts held in memory; larger parts are read in pieces of 8 MiB.
_MEMORY_BYTES = 64 << 20
_CHUNK_ROWS = 4096


def contents_of(storage: Storage, manifest: Manifest, tables: Collection[str] | None = None) -> Contents:
    """Read and check the rows and dense tensors of a version.

    Args:
        storage: store of the stream.
        manifest: manifest of the version.
        tables: FQNs of the tables whose parts are read; None for all.

    Raises:
        CorruptPartError: if a part is missing or does not match the manifest.
        StorageError: if the store cannot be read.
    """
    return Contents(storage, replace(manifest, parts=_parts(manifest, tables)), memory_bytes=_MEMORY_BYTES)


def check_tables(manifest: Manifest, tables: Collection[str], snapshot: Manifest) -> None:
    """Check that the tables of a version are like those in the snapshot from which the version is built.

    Args:
        manifest: manifest of the version.
        tables: FQNs of the tables to check.
        snapshot: manifest of the snapshot.

    Raises:
        MalformedError: if the spec or the rule for raw ids of a table differs, or the snapshot does not have the table.
    """
    for fqn, spec in manifest.tables.items():
        if fqn in tables and spec != snapshot.tables.get(fqn):
            found = snapshot.tables.get(fqn, "missing")
            reason = f"its table {fqn!r} is {spec}, and {found} in snapshot {snapshot.version}"
            raise MalformedError(entry_name(manifest.version), reason)
        if fqn in tables and manifest.identities.get(fqn) != snapshot.identities.get(fqn):
            reason = f"its table {fqn!r} has other buckets of raw ids than in snapshot {snapshot.version}"
            raise MalformedError(entry_name(manifest.version), reason)


def bytes_to_read(manifests: Iterable[Manifest], tables: Collection[str] | None = None) -> int:
    """Return the approximate number of bytes that :func:`contents_of` and :func:`write_rows` read in total.

    A part above 64 MiB is counted twice, because both functions read it.

    Args:
        manifests: manifests of the versions.
        tables: FQNs of the tables whose parts are read; None for all.
    """
    parts = [part for manifest in manifests for part in _parts(manifest, tables)]
    return sum(part.num_bytes * (1 if part.num_bytes <= _MEMORY_BYTES else 2) for part in parts)


def write_rows(contents: Contents, tables: Mapping[str, Tensor]) -> None:
    """Write the rows of a version to tables.

    Args:
        contents: contents of the version.
        tables: FQN to ``[rows, columns]``, written in place; rows of other tables are skipped.

    Raises:
        CorruptPartError: if a part that is too large for memory changed after it was checked.
        StorageError: if such a part cannot be read again.
    """
    targets = {fqn: TensorTarget.of(table) for fqn, table in tables.items()}
    for rows in (contents.whole, contents.listed):
        for placement in place([each for each in rows if each.block.table in targets], targets):
            for chunk in placement.chunks(_CHUNK_ROWS):
                chunk.write()


def write_owners(contents: Contents, owners: Mapping[str, Tensor]) -> None:
    """Write the raw ids of a version's rows to tensors.

    Args:
        contents: contents of the version.
        owners: FQN to ``[rows]`` int64, written in place; rows of other tables are skipped.

    Raises:
        CorruptPartError: if a part that is too large for memory changed after it was checked.
        StorageError: if such a part cannot be read again.
    """
    for fqn, ids, raw_ids in contents.owners():
        if fqn in owners:
            owners[fqn][ids] = raw_ids


def mapped(
    path: Path, specs: Mapping[str, TableSpec] | Mapping[str, DenseSpec], header: bytes = b""
) -> dict[str, Tensor]:
    """Create a file for tensors, and return the memory-mapped tensors by name. Allocates the disk space immediately.

    Args:
        path: path of the new file.
        specs: name to spec of each tensor, in the order of the file.
        header: first bytes of the file, before the tensors.

    Raises:
        OSError: if the disk is full, or the file cannot be written.
    """
    sizes = {name: math.prod(shape_of(spec)) * spec.dtype.itemsize for name, spec in specs.items()}
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        # If the file were sparse and the disk full, a write through the mapping would kill the process.
        os.posix_fallocate(file.fileno(), 0, max(1, len(header) + sum(sizes.values())))
    tensors, begin = {}, len(header)
    for name, spec in specs.items():
        if sizes[name]:
            data = np.memmap(path, np.uint8, mode="r+", offset=begin, shape=(sizes[name],))
            tensors[name] = torch.from_numpy(data).view(spec.dtype).view(shape_of(spec))
        else:
            tensors[name] = torch.empty(shape_of(spec), dtype=spec.dtype)
        begin += sizes[name]
    return tensors


def shape_of(spec: TableSpec | DenseSpec) -> tuple[int, ...]:
    """Return the shape of the tensor that ``spec`` describes."""
    return spec.shape if isinstance(spec, DenseSpec) else (spec.num_rows, spec.dim)


def _parts(manifest: Manifest, tables: Collection[str] | None) -> tuple[Part, ...]:
    """Return the parts with rows of ``tables``; all parts if ``tables`` is None."""
    return tuple(
        part for part in manifest.parts if tables is None or any(block.table in tables for block in part.blocks)
    )
