"""Read access to the rows, optimizer states and raw ids of this rank's tables while they are trained."""

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from delta_tracker.rows import memory_span
from delta_tracker.sharding.optimizer_rows import StateWatch, kernel_scalars, table_states, unfused_storages
from delta_tracker.sharding.refusals import refuse_unrecoverable
from delta_tracker.sharding.weights import column_views, state_views
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.tracked_model import TrackedModel
from delta_tracker.types import Identity, ShardSpec, TableSpec, TableStates


class LiveTables:
    """Read access to this rank's rows, optimizer states and raw ids of the tables during training.

    Used by components that copy more than the changed rows, such as a publisher. A view shares memory with the model:
    copy it before the next batch to keep its values. Methods that accept ``fqn`` raise InvalidArgumentError if the
    table is not tracked.

    Args:
        model: the tracked model.
        log: the tracker's change log.

    Attributes:
        model: the tracked model.
    """

    def __init__(self, model: TrackedModel, log: ChangeLog) -> None:
        self.model = model.module
        self._model = model
        self._log = log

    @property
    def num_attached(self) -> int:
        """Number of times that the tracker was attached. Tables and shards change only when this number increases."""
        return self._model.num_attached

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Spec of each table, by FQN. Equal on all ranks."""
        return MappingProxyType(self._model.found.tables)

    @property
    def shards(self) -> Mapping[str, ShardSpec]:
        """Spec of this rank's shard of each table, by table FQN. The shard is empty on a rank without rows."""
        return {fqn: shard.spec for fqn, shard in self._model.shards.items()}

    @property
    def fused_tables(self) -> frozenset[str]:
        """FQNs of the tables with a fused optimizer. Equal on all ranks."""
        return frozenset(fqn for fqn, shard in self._model.shards.items() if shard.is_fused)

    def column_views(self, fqn: str) -> list[Tensor]:
        """Return views ``[R, columns]`` of this rank's ``R`` rows, one for each range of ``shards[fqn].columns``."""
        return column_views(self._model.shard(fqn))

    def spans(self) -> set[tuple[str, int, int]]:
        """Return the memory ranges of this rank's tables as tuples ``(device, start address, end address)``.

        The result is empty while the tracker is detached. May be called from any thread. Does not flush row caches.
        """
        shards = self._model.shards.values() if self._model.is_attached else ()
        memories = (holder.memory(slot) for shard in shards for holder, slot in shard.holders)
        return {memory_span(memory) for memory in memories if memory is not None}

    # Raw ids

    @property
    def identities(self) -> Mapping[str, Identity]:
        """Rule that assigns raw ids to rows, for each table with managed collisions, by FQN. Equal on all ranks."""
        return {fqn: store.source.identity for fqn, store in self._log.segments.owners.items()}

    @property
    def collision_modules(self) -> Mapping[str, nn.Module]:
        """This rank's managed-collision module of each table with managed collisions, by table FQN."""
        return {fqn: store.source.module for fqn, store in self._log.segments.owners.items()}

    def owner_views(self) -> dict[str, Tensor]:
        """Return the raw id of each row on this rank, for each table with managed collisions, by FQN.

        Each tensor is ``[R]`` int64 for the ``R`` rows of the shard. The raw id of a row without one is 2**63 - 1. Do
        not write to the tensors. The tracker's reads, ``add_consumer``, ``clear`` and ``state_dict`` update them, and
        so does ``step`` if ``max_bytes`` is exceeded. ``reattach`` and loading a tracker's state replace them.
        """
        return {fqn: store.owners for fqn, store in self._log.segments.owners.items()}

    # Optimizer states

    @property
    def table_states(self) -> Mapping[str, TableStates]:
        """Per-row states of each table's fused optimizer in this rank's column ranges, by table FQN.

        Tables without a fused optimizer and tables without rows on this rank are omitted. Raises UnsupportedModelError
        if a state has a dtype other than float32, float16 and bfloat16.
        """
        found = {fqn: table_states(shard) for fqn, shard in self._model.shards.items()}
        return {fqn: states for fqn, states in found.items() if states is not None}

    def state_views(self, fqn: str) -> list[list[Tensor]]:
        """Return views of the optimizer states: for each column range in ``shards[fqn].columns``, one view per state.

        Each view is ``[R, columns]``, or ``[R, 1]`` for a state with one number per row.
        """
        return state_views(self._model.shard(fqn))

    def watch_states(self) -> StateWatch:
        """Return an object that detects later in-place writes to the optimizer states."""
        return StateWatch(lambda: self._model.shards)

    def kernel_scalars(self) -> dict[str, dict[str, int | float | Tensor]]:
        """Return the iteration counters and hyperparameters of the fused optimizers on this rank, by table FQN.

        The keys are ``iter``, ``iter_cpu``, ``lr``, ``group_lr``, ``eps``, ``beta1``, ``beta2`` and ``weight_decay``.
        For a kernel on an accelerator, ``iter`` is a tensor of the kernel. Reading its value waits for the device.
        """
        return kernel_scalars(self._model.shards)

    def unfused_storages(self) -> dict[str, tuple[set[int], bool]]:
        """Return the storage addresses of this rank's weights for each table without a fused optimizer, by FQN.

        Each value is a pair: the addresses, and True if the table is DATA_PARALLEL.
        """
        return {
            fqn: (unfused_storages(shard), shard.spec.is_replicated)
            for fqn, shard in self._model.shards.items()
            if not shard.is_fused
        }

    def check_recoverable(self) -> None:
        """Raise UnsupportedModelError if a stream cannot contain the optimizer states of this model.

        Rejects untracked tables, a ``DMPCollection``, managed collisions of a class other than MCH or with a custom
        eviction policy, and fused optimizers with counters per row, a global weight decay, or states with a dtype other
        than float32, float16 and bfloat16.
        """
        refuse_unrecoverable(self._model.found, self.collision_modules)
        for shard in self._model.shards.values():
            table_states(shard)
