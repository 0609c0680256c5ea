"""Training states of all ranks in one version."""

from __future__ import annotations

from typing import Any

from delta_tracker.errors import CorruptPartError
from delta_tracker.state_tree import StateReader
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import read_training
from delta_tracker.stream.storage.storage import Storage


class TrainingStates:
    """Reader of the training states of all ranks in one version. An object is opened when it is first needed.

    Args:
        storage: store of the stream.
        entry: entry of format 2.
    """

    def __init__(self, storage: Storage, entry: Manifest) -> None:
        self._storage = storage
        self._stored = entry.training
        self._readers: dict[int, StateReader] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks that published the version."""
        return len(self._stored)

    def load(self, rank: int, *path: str) -> Any:  # noqa: ANN401  the state of an object of the user
        """Return a value of the training state of a rank.

        Args:
            rank: the rank.
            path: keys that lead to the value.

        Raises:
            CorruptPartError: if the object does not match its record, or has no such value.
            StorageError: if the store cannot be read.
        """
        reader = self._reader(rank)
        try:
            return reader.load(*path)
        except CorruptPartError:
            raise
        except (KeyError, ValueError) as error:
            raise CorruptPartError(self._stored[rank].name, f"it has no value {'.'.join(path)}: {error}") from error

    def has(self, rank: int, *path: str) -> bool:
        """Return True if the training state of a rank has a value, with the errors of :meth:`load`."""
        return path[-1] in self.keys(rank, *path[:-1])

    def keys(self, rank: int, *path: str) -> list[str]:
        """Return the keys of a dict, without reading its values. The arguments and errors are those of :meth:`load`."""
        reader = self._reader(rank)
        try:
            return reader.keys(*path)
        except CorruptPartError:
            raise
        except (KeyError, ValueError) as error:
            raise CorruptPartError(self._stored[rank].name, f"it has no dict {'.'.join(path)}: {error}") from error

    def _reader(self, rank: int) -> StateReader:
        if rank not in self._readers:
            self._readers[rank] = read_training(self._storage, self._stored[rank])
        return self._readers[rank]
