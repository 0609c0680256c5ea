"""The tables of a version, put together in files that are mapped into memory: they may be larger than it."""

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

# Of the parts of one version; what is larger is read in pieces of 8 MiB.
_MEMORY_BYTES = 64 << 20
_CHUNK_ROWS = 4096


def contents_of(storage: Storage, manifest: Manifest, tables: Collection[str] | None = None) -> Contents:
    """A version's rows and dense tensors, checked.

    Args:
        storage: where it lies.
        manifest: its entry.
        tables: read only the parts that hold these, by FQN; None for all.

    Raises:
        CorruptPartError, StorageError: as :class:`~delta_tracker.stream.format.contents.Contents`.
    """
    return Contents(storage, replace(manifest, parts=_parts(manifest, tables)), memory_bytes=_MEMORY_BYTES)


def check_tables(manifest: Manifest, tables: Collection[str], snapshot: Manifest) -> None:
    """Refuse a version that does not go with the snapshot that it is to be applied to.

    Args:
        manifest: the version's.
        tables: those that are wanted, by FQN.
        snapshot: the snapshot's.

    Raises:
        MalformedError: if one of them is another table there.
    """
    for fqn, spec in manifest.tables.items():
        if fqn in tables and spec != snapshot.tables.get(fqn):
            found = snapshot.tables.get(fqn, "missing")
            reason = f"its table {fqn!r} is {spec}, and {found} in snapshot {snapshot.version}"
            raise MalformedError(entry_name(manifest.version), reason)


def bytes_to_read(manifests: Iterable[Manifest], tables: Collection[str] | None = None) -> int:
    """About how much :func:`contents_of` and :func:`write_rows` read: what is not held in memory is read twice."""
    parts = [part for manifest in manifests for part in _parts(manifest, tables)]
    return sum(part.num_bytes * (1 if part.num_bytes <= _MEMORY_BYTES else 2) for part in parts)


def write_rows(contents: Contents, tables: Mapping[str, Tensor]) -> None:
    """Write the rows that a version has of some tables.

    Args:
        contents: the version's.
        tables: ``[rows, columns]`` by FQN, written in place; rows of others are passed over.

    Raises:
        CorruptPartError, StorageError: if a large part cannot be read again, or has changed.
    """
    targets = {fqn: TensorTarget.of(table) for fqn, table in tables.items()}
    for rows in (contents.whole, contents.listed):
        for placement in place([each for each in rows if each.block.table in targets], targets):
            for chunk in placement.chunks(_CHUNK_ROWS):
                chunk.write()


def mapped(
    path: Path, specs: Mapping[str, TableSpec] | Mapping[str, DenseSpec], header: bytes = b""
) -> dict[str, Tensor]:
    """Tensors one after the other in a new file, with its room on the disk taken at once.

    Args:
        path: the file.
        specs: by name.
        header: what comes before them.

    Raises:
        OSError: if there is no room, or it cannot be written.
    """
    sizes = {name: math.prod(shape_of(spec)) * spec.dtype.itemsize for name, spec in specs.items()}
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        # Of a file with holes on a full disk, the first write through the mapping would kill the process.
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
    """Of the tensor."""
    return spec.shape if isinstance(spec, DenseSpec) else (spec.num_rows, spec.dim)


def _parts(manifest: Manifest, tables: Collection[str] | None) -> tuple[Part, ...]:
    """The parts that hold rows of some tables; None for all parts."""
    return tuple(
        part for part in manifest.parts if tables is None or any(block.table in tables for block in part.blocks)
    )
