"""Write the tables of a version to memory-mapped files, which may be larger than the main memory."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from delta_tracker.errors import MalformedError
from delta_tracker.predictor.placement import placements
from delta_tracker.row_target import TensorTarget
from delta_tracker.stream.format.manifest import DenseSpec, Manifest, entry_name
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec

# Maximum bytes of a version's parts held in memory; larger parts are read in pieces of 8 MiB.
_MEMORY_BYTES = 64 << 20
_CHUNK_ROWS = 4096


def write_versions(
    storage: Storage,
    manifests: Iterable[Manifest],
    rows: Mapping[str, Tensor],
    owners: Mapping[str, Tensor],
    *,
    like: Manifest,
    table: str | None = None,
    advance: Callable[[int], None],
) -> dict[str, Tensor]:
    """Apply the versions ``manifests``, in order, to tensors of rows and raw ids. Return the dense tensors by name.

    ``rows`` contains a ``[rows, columns]`` tensor for the rows of each table, and ``owners`` a ``[rows]`` int64 tensor
    for its raw ids, by FQN. The tensors are written in place. Tables without a tensor are skipped. If ``table`` is
    given, only parts that contain this table are read. ``advance`` is called after each version with its size in bytes.

    Raises:
        MalformedError: if ``like`` lacks a table of a version, or contains it with a different spec or different
            buckets of raw ids.
    """
    targets = {fqn: TensorTarget.of(each) for fqn, each in rows.items()}
    dense: dict[str, Tensor] = {}
    for manifest in manifests:
        _check_tables(manifest, table, like)
        parts = tuple(
            each for each in manifest.parts if table is None or any(block.table == table for block in each.blocks)
        )
        contents = Contents(storage, replace(manifest, parts=parts), memory_bytes=_MEMORY_BYTES)
        for kind in (contents.whole, contents.listed):
            for placement in placements([each for each in kind if each.block.table in targets], targets):
                for chunk in placement.chunks(_CHUNK_ROWS):
                    chunk.write()
        for fqn, ids, raw_ids in contents.owners():
            if fqn in owners:
                owners[fqn][ids] = raw_ids
        dense |= {name: tensor.clone() for name, tensor in contents.dense.items()}
        advance(manifest.num_bytes)
    return dense


def mapped(path: Path, specs: Mapping[str, DenseSpec], header: bytes = b"") -> dict[str, Tensor]:
    """Create a file, and return memory-mapped tensors in it, by name. The disk space is allocated immediately.

    The file contains the bytes ``header``, followed by the tensors in the order of ``specs``.
    """
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        num_bytes = len(header) + sum(spec.num_bytes for spec in specs.values())
        # If the file were sparse and the disk full, a write through the mapping would kill the process.
        os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))
    tensors, begin = {}, len(header)
    for name, spec in specs.items():
        if spec.num_bytes:
            data = np.memmap(path, np.uint8, mode="r+", offset=begin, shape=(spec.num_bytes,))
            tensors[name] = torch.from_numpy(data).view(spec.dtype).view(spec.shape)
        else:
            tensors[name] = torch.empty(spec.shape, dtype=spec.dtype)
        begin += spec.num_bytes
    return tensors


def rows_spec(table: TableSpec) -> DenseSpec:
    """Return the dtype and shape of a tensor for all rows of ``table``."""
    return DenseSpec(table.dtype_name, (table.num_rows, table.dim))


def _check_tables(manifest: Manifest, table: str | None, like: Manifest) -> None:
    for fqn, spec in manifest.tables.items():
        if table not in (None, fqn):
            continue
        reason = None
        if spec != like.tables.get(fqn):
            reason = f"its table {fqn!r} is {spec}, and {like.tables.get(fqn, 'missing')} in snapshot {like.version}"
        elif manifest.identities.get(fqn) != like.identities.get(fqn):
            reason = f"its table {fqn!r} has other buckets of raw ids than in snapshot {like.version}"
        if reason is not None:
            raise MalformedError(entry_name(manifest.version), reason)
