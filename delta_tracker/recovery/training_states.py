"""Read the training states of all ranks from a version, including the values that the library itself saves."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, TypedDict, TypeVar, cast

import torch
from msgspec import Struct, ValidationError, convert
from torch import Tensor

from delta_tracker.errors import CorruptPartError
from delta_tracker.sharding.collision_states import collision_fault
from delta_tracker.stream.format.field_types import Count
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.part_reader import read_training
from delta_tracker.stream.format.state_tree import StateReader
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec, TableSpec

DATA = "data"  # name of the position in the data, among the states of the ranks

_T = TypeVar("_T")


class _Kernel(TypedDict):
    """Scalars of a table's optimizer kernel, see :func:`~delta_tracker.sharding.optimizer_rows.kernel_scalars`."""

    iter: Count
    iter_cpu: Count
    lr: float
    group_lr: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float


class ConsumerPosition(Struct, frozen=True):
    """Saved position of a consumer of the tracker. The publisher's own consumer has no such position.

    Args:
        version: newest version of which the consumer had read all rows; None if there is no such version.
        left_out: global ids (``[N]`` int64) of rows that changed in earlier versions but are still pending, by FQN.
        place: stream position of the publisher that uses the consumer; None if the consumer has no publisher.
    """

    version: Count | None
    left_out: dict[str, Tensor]
    place: dict[str, Any] | None = None


class TrainingStates:
    """Reader of the training states of all ranks from one version. Objects are read from the store when first needed.

    The states are untrusted. Methods raise :class:`~delta_tracker.errors.CorruptPartError` if an object does not match
    its record in the entry, or if a value is missing or invalid.
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

    def load(self, rank: int, *path: str) -> Any:  # noqa: ANN401  the state of an object of the user
        """Return the value at the nested keys ``path`` in the training state of ``rank``."""
        return self._found(rank, "value", path, StateReader.load)

    def keys(self, rank: int, *path: str) -> list[str]:
        """Return the keys of the dict at the nested keys ``path``, without reading its values."""
        return self._found(rank, "dict", path, StateReader.keys)

    def fields(self, rank: int, *path: str) -> list[str] | None:
        """Return the result of :meth:`keys`, or None if the value is not a dict with string keys."""
        return self._found(rank, "value", path, _fields)

    def names_of(self, rank: int) -> list[str]:
        """Return the names of the per-rank states of ``rank``, including :data:`DATA` if it saved a data position."""
        return [*self.keys(rank, "rank"), *([] if self.load(rank, DATA) is None else [DATA])]

    def of_all_ranks(self, name: str) -> list[Any]:
        """Return the per-rank states called ``name`` in rank order, with None for a rank that has no such state."""
        path, ranks = (DATA,) if name == DATA else ("rank", name), range(self.world_size)
        return [self.load(rank, *path) if name in self.names_of(rank) else None for rank in ranks]

    def kernels(self, rank: int) -> dict[str, dict[str, int | float]]:
        """Return scalars of the kernels of ``rank``, such as ``iter`` and ``lr``, by FQN of the table."""
        held = self._library(rank, "kernels", dict[str, dict[str, Any]])
        numbers = {fqn: {name: _number(value) for name, value in each.items()} for fqn, each in held.items()}
        return cast("dict[str, dict[str, int | float]]", self._converted(rank, "kernels", numbers, dict[str, _Kernel]))

    def shards(self, rank: int, tables: Mapping[str, TableSpec]) -> dict[str, ShardSpec]:
        """Return the shards of ``rank``, by FQN, for ``tables``, which must be tables without a fused optimizer."""
        held = self._library(rank, "shards", dict[str, dict[str, Any]])
        named = {fqn: held[fqn] for fqn in tables if fqn in held}
        for fqn, former in named.items():
            if "rows" in former:  # of a release before 0.1.0
                first, end = self._converted(rank, "shards", former["rows"], tuple[int, int])
                rows = {"row_offset": first, "num_rows": end - first, "is_replicated": former.get("replicated")}
                named[fqn] = {"table": asdict(tables[fqn]), "columns": former.get("columns"), **rows}
        found = self._converted(rank, "shards", named, dict[str, ShardSpec])
        if missing := sorted(fqn for fqn, table in tables.items() if fqn not in found or found[fqn].table != table):
            raise self._error(rank, "shards", f"it has no tables {missing}")
        return {fqn: found[fqn] for fqn in tables}

    def parameters(self, rank: int, kind: str, name: str) -> list[list[list[str]]] | None:
        """Return the saved parameter names of the optimizer ``name`` by group. Return None if they were not saved.

        ``kind`` is "training" or "rank".
        """
        if "parameters" not in self.keys(rank, "library"):
            return None
        found = self._library(rank, "parameters", dict[str, list[list[list[str]]]]).get(name)
        if found is not None:
            sizes = [len(group["params"]) for group in self.load(rank, kind, name, "param_groups")]
            if sizes != [len(group) for group in found]:
                raise self._error(rank, "parameters", f"{name!r} has {sizes} parameters in its groups")
        return found

    def dense(self) -> dict[str, Tensor]:
        """Return the dense tensors that are stored in the training states, not in the parts of the version, by name."""
        return self._library(0, "dense", dict[str, Tensor])

    def buffers(self, rank: int) -> dict[str, Tensor]:
        """Return the buffers of ``rank`` by name. For rank 0, return an empty dict: its buffers are dense tensors."""
        return self._library(rank, "buffers", dict[str, Tensor]) if rank else {}

    def publisher(self) -> str:
        """Return the name of the publisher's consumer."""
        return self._library(0, "publisher", str)

    def consumers(self, rank: int) -> dict[str, ConsumerPosition]:
        """Return the positions of the tracker's consumers on ``rank``, except the publisher's consumer, by name."""
        found = self._library(rank, "consumers", dict[str, ConsumerPosition])
        for name, consumer in found.items():
            if consumer.version is not None and consumer.version > self.version:
                raise self._error(rank, "consumers", f"{name!r} had read version {consumer.version}, which is later")
            for fqn, ids in consumer.left_out.items():
                if ids.dtype != torch.int64 or ids.dim() != 1:
                    reason = f"the ids of {name!r} in {fqn!r} are {ids.dtype} {list(ids.shape)}"
                    raise self._error(rank, "consumers", reason)
        return found

    def collision_slots(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return the slots of each managed-collision module of ``rank`` as a half-open range, by FQN."""
        found = {}
        for fqn in self.keys(rank, "library", "collisions"):
            read = (self.load(rank, "library", "collisions", fqn, name) for name in ("offset", "zch_size"))
            first, size = (self._converted(rank, "collisions", value, Count) for value in read)
            found[fqn] = first, first + size
        return found

    def collision(self, rank: int, fqn: str) -> dict[str, Any]:
        """Return the state of the managed-collision module of the table ``fqn`` on ``rank``."""
        value = self.load(rank, "library", "collisions", fqn)
        found = self._converted(rank, "collisions", value, dict[str, Any])
        if fault := collision_fault(found):
            raise self._error(rank, "collisions", f"{fault} of {fqn!r}")
        return found

    def _library(self, rank: int, key: str, kind: type[_T]) -> _T:
        return self._converted(rank, key, self.load(rank, "library", key), kind)

    def _converted(self, rank: int, key: str, value: object, kind: type[_T]) -> _T:
        try:
            return convert(value, kind)
        except ValidationError as error:
            raise self._error(rank, key, str(error)) from error

    def _error(self, rank: int, key: str, reason: str) -> CorruptPartError:
        return CorruptPartError(self._stored[rank].name, f"its library.{key} is invalid: {reason.removesuffix('.')}")

    def _found(self, rank: int, what: str, path: tuple[str, ...], read: Callable[..., _T]) -> _T:
        if rank not in self._readers:
            self._readers[rank] = read_training(self._storage, self._stored[rank])
        try:
            return read(self._readers[rank], *path)
        except CorruptPartError:
            raise
        except (KeyError, ValueError) as error:
            raise CorruptPartError(self._stored[rank].name, f"it has no {what} {'.'.join(path)}: {error}") from error


def _fields(reader: StateReader, *path: str) -> list[str] | None:
    try:
        return reader.keys(*path)
    except CorruptPartError:
        raise
    except ValueError:
        return None


def _number(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and not value.dim() else value
