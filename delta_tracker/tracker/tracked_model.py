"""The tracked model: which tables it has, and what this rank holds of them at present."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from delta_tracker.errors import DetachedError, InvalidArgumentError
from delta_tracker.sharding.discover import Discovery, LocalShard, discover
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.sharding.refusals import refuse_unseen_writes
from delta_tracker.tracker.modes import Capture


class TrackedModel:
    """A model whose tables can all be tracked, as it is sharded now.

    The stores, the reads and the checkpoints of a tracker share one of these and ask it for a shard at each use. So
    :meth:`take` is the only place where a reshard reaches them.

    Args:
        module: the model.
        fqns_to_skip: as in :class:`~delta_tracker.tracker.tracker.ModelDeltaTracker`.
        capture: the tracking mode, which may refuse a shard.

    Attributes:
        module: the model.
        found: what :meth:`discover` found last.
        shards: table FQN to what this rank holds of it.
        is_attached: whether its hooks are registered.

    Raises: as :meth:`discover`.
    """

    def __init__(self, module: nn.Module, fqns_to_skip: Iterable[str], capture: Capture) -> None:
        self.module = module
        self._skips = fqns_to_skip if isinstance(fqns_to_skip, str) else tuple(fqns_to_skip)
        self._capture = capture
        self.found = self.discover()
        self.shards: Mapping[str, LocalShard] = dict(self.found.shards)
        self.is_attached = False

    def discover(self) -> Discovery:
        """Return the model's tables as they are sharded now. Changes nothing.

        Raises:
            NoShardedModuleError: if the model has nothing to track.
            UnsupportedModuleError: if it has sharded modules that cannot be followed.
            UnsupportedOptimizerError: if a fused optimizer writes rows outside the backward pass, or is unknown.
            UnsupportedTableError: if a table's kernel cannot be followed, or its optimizer cannot serve the mode.
            MissingExtraError: if torchrec is not installed.
        """
        found = discover(self.module, self._skips)
        refuse_unseen_writes(self.module, found)
        with one_cut():
            for shard in found.shards.values():
                self._capture.check(shard)
        return found

    def take(self, found: Discovery) -> None:
        """Use the modules and shards of ``found`` from now on."""
        self.found = found
        self.shards = {**self.shards, **found.shards}

    def shard(self, fqn: str) -> LocalShard:
        """Return what this rank holds of a table.

        Raises:
            InvalidArgumentError: if the table is not tracked.
        """
        if fqn not in self.shards:
            raise InvalidArgumentError("fqn", fqn, f"Pass one of the tracked tables {sorted(self.shards)}")
        return self.shards[fqn]

    def check_attached(self) -> None:
        """Refuse a call that needs the hooks.

        Raises:
            DetachedError: after the tracker was detached.
        """
        if not self.is_attached:
            raise DetachedError
