"""Model of a tracker, with the model's tables and this rank's current shards of them."""

from collections.abc import Iterable, Mapping

from torch import nn

from delta_tracker.errors import DetachedError, InvalidArgumentError
from delta_tracker.sharding.discover import Discovery, discover
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.refusals import refuse_unseen_writes
from delta_tracker.tracker.modes import Capture


class TrackedModel:
    """The model that a tracker tracks, its tables, and this rank's current shards of these tables.

    The stores, the reader and the checkpoints of the tracker share one instance, and look up the shards at each use.
    After a reshard, call :meth:`take` with a new result of :meth:`discover`.

    Args:
        module: the model.
        fqns_to_skip: names of untracked tables, see :class:`~delta_tracker.tracker.tracker.ModelDeltaTracker`.
        capture: implementation of the tracking mode. It rejects shards that the mode does not support.

    Attributes:
        module: the model.
        found: tables and modules that :meth:`discover` found. :meth:`take` replaces this attribute.
        shards: this rank's shard of each table, by table FQN.
        is_attached: True while the tracker's hooks are registered.
        num_attached: number of times that the hooks were registered. The shards change only when this number increases.
    """

    def __init__(self, module: nn.Module, fqns_to_skip: Iterable[str], capture: Capture) -> None:
        self.module = module
        if isinstance(fqns_to_skip, str) or not isinstance(fqns_to_skip, Iterable):
            raise InvalidArgumentError("fqns_to_skip", fqns_to_skip, "Pass a list of names")
        self._skips = tuple(fqns_to_skip)
        self._capture = capture
        self.found = self.discover()
        self.shards: Mapping[str, LocalShard] = dict(self.found.shards)
        self.is_attached = False
        self.num_attached = 0

    def discover(self) -> Discovery:
        """Search the model for tables, and return the tables and their current shards. Does not change this object.

        Raises UnsupportedModelError if :class:`~delta_tracker.tracker.tracker.ModelDeltaTracker` does not support the
        model.
        """
        found = discover(self.module, self._skips)
        refuse_unseen_writes(self.module, found)
        with one_cut():
            for shard in found.shards.values():
                self._capture.check(shard)
        return found

    def take(self, found: Discovery) -> None:
        """Set :attr:`found` to a new result of :meth:`discover`, and update :attr:`shards`."""
        self.found = found
        self.shards = {**self.shards, **found.shards}

    def shard(self, fqn: str) -> LocalShard:
        """Return this rank's shard of the table ``fqn``. Raise InvalidArgumentError if the table is not tracked."""
        if fqn not in self.shards:
            raise InvalidArgumentError("fqn", fqn, f"Pass one of the tracked tables {sorted(self.shards)}")
        return self.shards[fqn]

    def check_attached(self) -> None:
        """Raise DetachedError if the tracker is detached, UnsupportedModelError if a table can no longer be tracked."""
        if not self.is_attached:
            raise DetachedError
        for table in self.found.plain:
            table.check()
