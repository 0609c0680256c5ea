"""The library as a program of the conformance kit: ``python -m tests.conformance.reference DIRECTORY --out FILE``."""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import safetensors.torch
import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, NewerFormatError, NoSnapshotError, StreamError
from delta_tracker.predictor.predictor import Predictor
from delta_tracker.predictor.served_model import ModelTarget
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.reading.path import path_to, snapshots
from delta_tracker.stream.storage.storage import Storage

_POLL_SECONDS = 0.02


class _Reader:
    """A predictor with the tables and the dense tensors of a stream.

    Args:
        storage: store of the stream.
        version: version to read; None for the newest.

    Raises:
        StreamError: if there is no snapshot to start from.
    """

    def __init__(self, storage: Storage, version: int | None) -> None:
        log = StreamLog(storage)
        path = _newest(log) if version is None else path_to(log, version)
        tables = next(each.tables for each in path if each.tables)
        Contents(storage, path[0])  # checks the sizes before the tables are allocated
        self._model = {fqn: torch.zeros(each.num_rows, each.dim, dtype=each.dtype) for fqn, each in tables.items()}
        for manifest in path:
            with suppress(StreamError):  # the predictor refuses the version
                self._model |= {name: each.clone() for name, each in Contents(storage, manifest).dense.items()}
        identities = path[0].identities
        self._indexes = {fqn: RawIdIndex(each.num_rows) for fqn, each in identities.items()}
        self._predictor = Predictor(ModelTarget(self._model, raw_ids=self._indexes), storage)
        self._version = version

    @property
    def version(self) -> int | None:
        """Last applied version."""
        return self._predictor.version

    def read(self) -> None:
        """Apply the version."""
        if self._version is None:
            self._predictor.sync()
        else:
            self._predictor.rollback(self._version)

    def step(self) -> bool:
        """Apply one version; return False if there is none."""
        before = self._predictor.version
        return self._predictor.sync(limit=1) != before

    def write(self, output: Path, ids: Path | None) -> None:
        """Write the tensors to a file."""
        tensors = dict(self._model)
        tensors |= {f"{fqn}.owners": index.owners() for fqn, index in self._indexes.items()}
        asked: dict[str, Tensor] = {} if ids is None else safetensors.torch.load_file(ids)
        tensors |= {f"{fqn}.answers": self._indexes[fqn].rows_of(each) for fqn, each in asked.items()}
        draft = output.with_name(f"{output.name}.{os.getpid()}")
        safetensors.torch.save_file(tensors, draft)
        draft.replace(output)


def _newest(log: StreamLog) -> list[Manifest]:
    """Return the newest snapshot and the readable entries after it."""
    snapshot = next(snapshots(log), None)
    if snapshot is None:
        raise NoSnapshotError(log.url)
    path = [snapshot]
    for version in log.versions(after=snapshot.version):
        with suppress(StreamError):  # the predictor refuses the entry
            entry = log.read(version)
            path += [] if entry is None else [entry]
    return path


def _follow(reader: _Reader, output: Path, ids: Path | None, stdin: IO[str], stdout: IO[str]) -> None:
    """Apply each later version until stdin ends."""
    reader.read()
    reader.write(output, ids)
    print(reader.version, file=stdout, flush=True)
    refused = ""
    while not select.select([stdin], [], [], _POLL_SECONDS)[0]:
        try:
            while reader.step():
                reader.write(output, ids)
                print(reader.version, file=stdout, flush=True)
                refused = ""
        except StreamError as error:
            word = "newer" if _status_of(error) == 3 else "refused"
            if word != refused:
                print(word, file=stdout, flush=True)
            refused = word


def _status_of(error: Exception) -> int:
    return 3 if isinstance(error, NewerFormatError) else 2


def main(
    argv: Sequence[str] | None = None,
    stdin: IO[str] = sys.stdin,
    stdout: IO[str] = sys.stdout,
    stderr: IO[str] = sys.stderr,
) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--version", type=int)
    parser.add_argument("--ids", type=Path)
    parser.add_argument("--follow", action="store_true")
    args = parser.parse_args(argv)
    try:
        reader = _Reader(Storage(args.directory.absolute().as_uri()), args.version)
        if args.follow:
            _follow(reader, args.out, args.ids, stdin, stdout)
        else:
            reader.read()
            reader.write(args.out, args.ids)
    except (StreamError, InvalidArgumentError) as error:
        print(str(error).splitlines()[0], file=stderr)
        return _status_of(error)
    return 0


if __name__ == "__main__":
    logging.getLogger("delta_tracker").setLevel(logging.CRITICAL)
    sys.exit(main())
