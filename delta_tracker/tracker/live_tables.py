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
    """Tables of this rank, which training overwrites: their rows, optimizer states and raw ids.

    Used by components that copy more than the changed rows, such as a publisher. A view shares memory with the model,
    which training overwrites: copy it before the next batch to keep its values. Methods with an ``fqn`` raise
    InvalidArgumentError if the table is not tracked.

    Args:
        model: the tracked model.
        log: the tracker's log, which has the raw ids.

    Attributes:
        model: the tracked model.
    """

    def __init__(self, model: TrackedModel, log: ChangeLog) -> None:
        self.model = model.module
        self._model = model
        self._log = log

    @property
    def num_attached(self) -> int:
        """Number of times that the tracker was attached. Tables and shards change only at a call of ``reattach``."""
        return self._model.num_attached

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Mapping from FQN to table, the same on every rank."""
        return MappingProxyType(self._model.found.tables)

    @property
    def shards(self) -> Mapping[str, ShardSpec]:
        """Mapping from table FQN to this rank's block of the table. The block is empty on a rank without rows."""
        return {fqn: shard.spec for fqn, shard in self._model.shards.items()}

    @property
    def fused_tables(self) -> frozenset[str]:
        """FQNs of the tables whose optimizer is fused, the same on every rank. Hooks record updates of these tables."""
        return frozenset(fqn for fqn, shard in self._model.shards.items() if shard.is_fused)

    def column_views(self, fqn: str) -> list[Tensor]:
        """Return views ``[R, columns]`` of this rank's ``R`` rows, one for each range of ``shards[fqn].columns``."""
        return column_views(self._model.shard(fqn))

    def spans(self) -> set[tuple[str, int, int]]:
        """Return the device, the first address and the end of each table on this rank; empty while detached.

        Any thread may call this method: no cache is flushed.
        """
        shards = self._model.shards.values() if self._model.is_attached else ()
        memories = (holder.memory(slot) for shard in shards for holder, slot in shard.holders)
        return {memory_span(memory) for memory in memories if memory is not None}

    # Raw ids

    @property
    def identities(self) -> Mapping[str, Identity]:
        """Rule that routes raw ids, by FQN of each table with managed collisions; the same on every rank."""
        return {fqn: store.source.identity for fqn, store in self._log.segments.owners.items()}

    @property
    def collision_modules(self) -> Mapping[str, nn.Module]:
        """Mapping from the FQN of each table with managed collisions to this rank's module of the table."""
        return {fqn: store.source.module for fqn, store in self._log.segments.owners.items()}

    def owner_views(self) -> dict[str, Tensor]:
        """Return the raw ids that own this rank's rows, for each table with managed collisions, by FQN.

        Each tensor is ``[R]`` int64 for the ``R`` rows of the shard, and has 2**63 - 1 for a row that no raw id owns.
        It belongs to the tracker: do not write to it. Each cut updates it. Cuts are made by reads, ``add_consumer``,
        ``clear`` and ``state_dict`` of the tracker, and ``step`` if ``max_bytes`` is exceeded. ``reattach`` and loads
        of a tracker's state replace it.
        """
        return {fqn: store.owners for fqn, store in self._log.segments.owners.items()}

    # Optimizer states

    @property
    def table_states(self) -> Mapping[str, TableStates]:
        """Mapping from FQN to the states that the fused optimizer keeps per row, for this rank's column ranges.

        Tables without a fused optimizer, and tables of which this rank has no rows, are missing. Raises
        UnsupportedModelError if a state has another dtype than float32, float16 or bfloat16.
        """
        found = {fqn: table_states(shard) for fqn, shard in self._model.shards.items()}
        return {fqn: states for fqn, states in found.items() if states is not None}

    def state_views(self, fqn: str) -> list[list[Tensor]]:
        """Return views of the optimizer's states, for each column range in ``shards[fqn].columns`` and each state.

        Each view is ``[R, columns]``, or ``[R, 1]`` for a state of one number per row.
        """
        return state_views(self._model.shard(fqn))

    def watch_states(self) -> StateWatch:
        """Return a detector of later in-place writes to the optimizer's states."""
        return StateWatch(lambda: self._model.shards)

    def kernel_scalars(self) -> dict[str, dict[str, int | float | Tensor]]:
        """Return the iteration counters and hyperparameters of the fused optimizers on this rank, by table FQN.

        The keys are ``iter``, ``iter_cpu``, ``lr``, ``group_lr``, ``eps``, ``beta1``, ``beta2`` and ``weight_decay``.
        ``iter`` of a kernel on a device is a live tensor, because reading its value would wait for the device.
        """
        return kernel_scalars(self._model.shards)

    def unfused_storages(self) -> dict[str, tuple[set[int], bool]]:
        """Return the addresses of the storages of the unfused tables' weights on this rank, by FQN.

        The second value is True for a DATA_PARALLEL table. Its optimizer has the same state on every rank.
        """
        return {
            fqn: (unfused_storages(shard), shard.spec.is_replicated)
            for fqn, shard in self._model.shards.items()
            if not shard.is_fused
        }

    def check_recoverable(self) -> None:
        """Raise UnsupportedModelError if a stream cannot have the states of all fused optimizers.

        Rejects untracked tables, a ``DMPCollection``, managed collisions of another class than MCH or with an eviction
        policy of the user's, and fused optimizers with counters per row, a global weight decay, or states of another
        dtype than float32, float16 or bfloat16.
        """
        refuse_unrecoverable(self._model.found, self.collision_modules)
        for shard in self._model.shards.values():
            table_states(shard)
