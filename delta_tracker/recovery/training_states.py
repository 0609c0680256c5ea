"""Training states of all ranks in one version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from delta_tracker.errors import CorruptPartError
from delta_tracker.recovery.fit import DATA
from delta_tracker.state_tree import StateReader
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import read_training
from delta_tracker.stream.storage.storage import Storage

_T = TypeVar("_T")


class TrainingStates:
    """Reader of the training states of all ranks in one version, which opens an object when it is first needed.

    An object that does not match its record, or has no such value, raises CorruptPartError.
    """

    def __init__(self, storage: Storage, entry: Manifest) -> None:
        self._storage = storage
        self._stored = entry.training
        self.version = entry.version
        self._readers: dict[int, StateReader] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks that published the version."""
        return len(self._stored)

    def name(self, rank: int) -> str:
        """Return the name of the object with the training state of a rank."""
        return self._stored[rank].name

    def load(self, rank: int, *path: str) -> Any:  # noqa: ANN401  the state of an object of the user
        """Return the value of the training state of a rank to which the keys ``path`` lead."""
        return self._found(rank, "value", path, StateReader.load)

    def keys(self, rank: int, *path: str) -> list[str]:
        """Return the keys of a dict, without reading its values."""
        return self._found(rank, "dict", path, StateReader.keys)

    def fields(self, rank: int, *path: str) -> list[str] | None:
        """Return the keys of a dict as :meth:`keys`; None if the value is no dict with only string keys."""
        return self._found(rank, "value", path, _fields)

    def names_of(self, rank: int) -> list[str]:
        """Return the names of the states that differ by rank, with :data:`DATA` if the rank had a position."""
        return [*self.keys(rank, "rank"), *([] if self.load(rank, DATA) is None else [DATA])]

    def of_rank(self, rank: int, name: str) -> Any:  # noqa: ANN401
        """Return the state of a rank with one of :meth:`names_of`."""
        return self.load(rank, DATA) if name == DATA else self.load(rank, "rank", name)

    def of_all_ranks(self, name: str) -> list[Any]:
        """Return :meth:`of_rank` of all ranks, in rank order; None for a rank without such a state."""
        ranks = range(self.world_size)
        return [self.of_rank(rank, name) if name in self.names_of(rank) else None for rank in ranks]

    def _found(self, rank: int, what: str, path: tuple[str, ...], read: Callable[..., _T]) -> _T:
        if rank not in self._readers:
            self._readers[rank] = read_training(self._storage, self._stored[rank])
        try:
            return read(self._readers[rank], *path)
        except CorruptPartError:
            raise
        except (KeyError, ValueError) as error:
            raise CorruptPartError(self.name(rank), f"it has no {what} {'.'.join(path)}: {error}") from error


def _fields(reader: StateReader, *path: str) -> list[str] | None:
    try:
        return reader.keys(*path)
    except CorruptPartError:
        raise
    except ValueError:
        return None
