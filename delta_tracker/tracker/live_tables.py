"""Live tables of this rank: the rows, optimizer states and raw ids that training overwrites."""

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
    copy it before the next batch to keep its values. Methods taking ``fqn`` raise InvalidArgumentError if the table is
    not tracked.

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
        """Number of times that the tracker was attached. Tables and shards change only when this number changes."""
        return self._model.num_attached

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Tables by FQN, the same on every rank."""
        return MappingProxyType(self._model.found.tables)

    @property
    def shards(self) -> Mapping[str, ShardSpec]:
        """This rank's block of each table, by table FQN. The block is empty on a rank without rows."""
        return {fqn: shard.spec for fqn, shard in self._model.shards.items()}

    @property
    def fused_tables(self) -> frozenset[str]:
        """FQNs of the tables with a fused optimizer, the same on every rank. Hooks record updates of these tables."""
        return frozenset(fqn for fqn, shard in self._model.shards.items() if shard.is_fused)

    def column_views(self, fqn: str) -> list[Tensor]:
        """Return views ``[R, columns]`` of this rank's ``R`` rows, one for each range of ``shards[fqn].columns``."""
        return column_views(self._model.shard(fqn))

    def spans(self) -> set[tuple[str, int, int]]:
        """Return the device, first address and end address of each table's memory on this rank; empty while detached.

        May be called from any thread. Does not flush the row caches.
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

        Each tensor is ``[R]`` int64 for the ``R`` rows of the shard, with 2**63 - 1 for a row without a raw id. Do not
        write to the tensors. Each cut updates the tensors. Cuts are made by reads, ``add_consumer``, ``clear`` and
        ``state_dict`` of the tracker, and ``step`` if ``max_bytes`` is exceeded. ``reattach`` and loading a tracker's
        state replace the tensors.
        """
        return {fqn: store.owners for fqn, store in self._log.segments.owners.items()}

    # Optimizer states

    @property
    def table_states(self) -> Mapping[str, TableStates]:
        """States that the fused optimizer keeps for each row, for this rank's column ranges, by table FQN.

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
        For a kernel on a device, ``iter`` is the kernel's own tensor: reading its value waits for the device.
        """
        return kernel_scalars(self._model.shards)

    def unfused_storages(self) -> dict[str, tuple[set[int], bool]]:
        """Return the storage addresses of the weights of each table without a fused optimizer on this rank, by FQN.

        Each value is a pair: the addresses, and True for a DATA_PARALLEL table (its states are equal on all ranks).
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
