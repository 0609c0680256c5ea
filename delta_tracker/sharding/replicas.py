"""Hook that reports the rows that ``DMPCollection.sync`` changes in 2D parallelism.

In 2D parallelism, each of several groups of ranks trains its own replica of the tables. ``sync`` averages the replicas
of each shard in place, without autograd. TorchRec provides no hook for ``sync``. Therefore, the method of a
``DMPCollection`` is wrapped once for all trackers.

A row that no replica changed since the last ``sync`` is equal on all replicas. For 2 and 4 replicas, the average of
equal values has the same bits as the values, in every order of additions. For 3 and for 5 or more replicas, rounding of
the partial sums may change the average. For example, it changes 47 % of random values if 8 replicas are added one after
the other. Therefore, the ranks exchange masks of the changed rows only if a shard has 2 or 4 replicas. Otherwise, all
rows count as changed. All rows also count as changed at the first ``sync``, because the replicas may differ before it,
and if a user's function or a relay replaces the averaging.

The exchange is an all-reduce of one byte for each row of a shard, regardless of the number of changed rows. For 64
float32 columns, this is 0.4 % of the weights that ``sync`` averages.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist

from delta_tracker.rows import bits_of
from delta_tracker.sharding.discover import Discovery
from delta_tracker.sharding.kernel_memory import one_cut
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.torchrec_api import Torchrec, averages_itself, sync_groups, tbe_of
from delta_tracker.sharding.watcher import HookContext, Watcher, WrappedMethod
from delta_tracker.sharding.weights import row_chunks

_EXCHANGING = (2, 4)  # numbers of replicas whose average of equal values has the same bits, see the module's docstring
_CHUNK_ROWS = 1 << 15


class ReplicaGroup:
    """Tables that ``sync`` averages over one process group. The ranks of the group exchange masks of the changed rows.

    The buffer of the exchange takes one byte per row. It is allocated only once. Therefore, a rank that has run out of
    memory can still take part in the exchange.

    Args:
        ranks: process group whose ranks have the replicas.
        shards: one or more shards by FQN, in the same order on all ranks of the group, and all on the same device.

    Attributes:
        is_exchanged: True if the ranks exchange masks of changed rows; False if there is one replica, or if averaging
            may change every row.
    """

    def __init__(self, ranks: dist.ProcessGroup, shards: Mapping[str, LocalShard]) -> None:
        self.ranks = ranks
        self.shards = shards
        self.num_replicas = ranks.size()
        self.is_exchanged = self.num_replicas in _EXCHANGING
        self._device = next(iter(shards.values())).device
        # One byte for each table, which is 1 if all of its rows may change. One byte for each row follows.
        self._sizes = [len(shards), *(shard.spec.num_rows for shard in shards.values())]
        num_bytes = sum(self._sizes) if self.is_exchanged else 0
        self._marks = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def every_row(self) -> dict[str, Tensor | None]:
        """Return a dict that maps the FQN of each table to None, which means all rows."""
        return dict.fromkeys(self.shards)

    def no_row(self) -> dict[str, Tensor | None]:
        """Return a dict that maps the FQN of each table to an empty tensor of ids."""
        return {fqn: torch.empty(0, dtype=torch.int64, device=self._device) for fqn in self.shards}

    def pack(self, changed: Mapping[str, Tensor | None]) -> None:
        """Write this rank's changed rows to the buffer for :meth:`exchange`.

        ``changed`` maps each FQN to ``[N]`` local ids (duplicates are allowed), or to None for all rows.
        """
        is_whole, *marks = torch.split(self._marks.zero_(), self._sizes)
        is_whole.copy_(torch.tensor([ids is None for ids in changed.values()], device="cpu"))
        for own, ids in zip(marks, changed.values(), strict=True):
            if ids is not None:
                own.index_fill_(0, ids, 1)

    def pack_every_row(self) -> None:
        """Mark all rows of all tables as changed in the buffer for :meth:`exchange`. Allocates no memory."""
        self._marks.fill_(1)

    def exchange(self) -> dict[str, Tensor | None]:
        """Return the rows that changed on any rank, ``[N]`` ascending local ids by FQN; None for all rows.

        This is a collective operation. It waits for the device.
        """
        dist.all_reduce(self._marks, dist.ReduceOp.MAX, self.ranks)
        is_whole, *marks = torch.split(self._marks, self._sizes)
        return {
            fqn: None if whole else merged.nonzero().flatten()
            for fqn, whole, merged in zip(self.shards, is_whole.tolist(), marks, strict=True)
        }


class SyncHook(Watcher):
    """Hook that reports the rows that one ``DMPCollection`` averages.

    At each ``sync``, the hook runs a collective operation and waits for the device. All ranks that have replicas of a
    shard must therefore attach the same trackers in the same order, and attach or detach each tracker after the same
    number of ``sync`` calls.

    Args:
        dmp: the ``DMPCollection``.
        groups: groups of tracked tables that ``sync`` averages.
        context: listener, recorder and keys of the tracker.
        keeps_states: True if the tracker keeps the old states of rows.
    """

    def __init__(self, dmp: nn.Module, groups: list[ReplicaGroup], context: HookContext, *, keeps_states: bool) -> None:
        super().__init__([fqn for group in groups for fqn in group.shards], context)
        self._dmp = dmp
        self._groups = groups
        self._keeps_states = keeps_states
        self._left_out_states = False  # the optimizer states of the replicas may differ
        self._unstable: dict[str, Tensor] = {}  # FQN to the rows that the next average changes even if they are equal
        self._listener.diverged(self._tables)
        self._removals.append(WrappedMethod.add(self.before, dmp, "sync"))

    def before(self, include_optimizer_state: bool = True) -> Callable[[bool], object]:  # noqa: FBT001, FBT002
        """Report the rows that ``sync`` is about to average. Return a function to call after the ``sync``.

        This is a collective operation over each process group of the tables. ``include_optimizer_state`` is the
        argument of ``sync``. Pass True to the returned function if the ``sync`` succeeded, otherwise False.
        """
        key, includes_states = next(self._keys), bool(include_optimizer_state)
        self._contained(lambda: self._listener.notice_writes(self._tables), otherwise=None)
        ids: dict[str, Tensor | None] = {}
        for group in self._groups:
            for fqn, rows in self._rows_of_all_ranks(group, includes_states=includes_states).items():
                ids[fqn] = None if fqn in ids else rows  # all rows of a table that is averaged twice
        if self._keeps_states:
            self._contained(lambda: self._capture_whole(ids), otherwise=None)
        self._begin_write(key, ids)

        def after(is_synced: bool) -> None:  # noqa: FBT001  the only argument
            self._listener.diverged(self._tables)  # in case of an error below
            self._end_write(key, ids)
            self._listener.acknowledge_writes(self._tables)
            if is_synced:
                self._left_out_states = not includes_states
                for group in self._groups:
                    for fqn, shard in group.shards.items() if group.is_exchanged else ():
                        self._unstable[fqn] = unstable_rows(shard, ids[fqn], group.num_replicas)
                self._listener.synced(self._tables)

        return lambda is_synced: self._contained(partial(after, is_synced), otherwise=None)

    def _rows_of_all_ranks(self, group: ReplicaGroup, *, includes_states: bool) -> dict[str, Tensor | None]:
        """Return the rows that ``sync`` may change on any rank, ``[N]`` by FQN; None for all. May run a collective."""
        is_averaged = averages_itself(self._dmp)
        if not group.is_exchanged:
            is_unchanged = group.num_replicas == 1 and is_averaged
            return self._contained(group.no_row, otherwise=group.every_row()) if is_unchanged else group.every_row()
        is_whole = not is_averaged or (includes_states and self._left_out_states)
        if is_whole or not self._contained(lambda: self._pack_changed(group), otherwise=False):
            group.pack_every_row()  # also after an error, because the other ranks wait for a message
        return self._contained(group.exchange, otherwise=group.every_row())

    def _pack_changed(self, group: ReplicaGroup) -> bool:
        changed = self._listener.changed_since_sync(group.shards)
        group.pack(
            {
                fqn: ids if ids is None or fqn not in self._unstable else torch.cat([ids, self._unstable[fqn]])
                for fqn, ids in changed.items()
            }
        )
        return True

    def _capture_whole(self, ids: Mapping[str, Tensor | None]) -> None:
        """Mark all rows of each table that ``ids`` maps to None. Save the current states as old states."""
        with one_cut():
            for group in self._groups:
                for fqn, shard in group.shards.items():
                    for chunk in _every_chunk(shard) if ids[fqn] is None else ():
                        self._listener.mark(fqn, chunk, is_written=False)


def watch_syncs(model: nn.Module, found: Discovery, context: HookContext, *, keeps_states: bool) -> Iterator[Watcher]:
    """Register and yield a :class:`SyncHook` for each ``DMPCollection`` in ``model`` that averages tracked tables."""
    kinds = Torchrec().replicas
    for wrapper in model.modules():
        if not isinstance(wrapper, kinds):
            continue
        groups = []
        for ranks, modules in sync_groups(wrapper):
            tables = [
                fqn
                for kernel in found.kernels
                if kernel.is_fused and any(tbe_of(kernel.module) is module for module in modules)
                for fqn, _ in kernel.slots
                if fqn is not None
            ]
            if tables:
                groups.append(ReplicaGroup(ranks, {fqn: found.shards[fqn] for fqn in tables}))
        if groups:
            yield SyncHook(wrapper, groups, context, keeps_states=keeps_states)


def unstable_rows(shard: LocalShard, ids: Tensor | None, num_replicas: int) -> Tensor:
    """Return the local ids of the rows that the next ``sync`` changes although their replicas are equal.

    These rows have values near the limits of the dtype: a fraction of a small value may not be representable, and a sum
    of large values may overflow. Such values are frequent in float16. Only the next ``sync`` changes these rows. Later
    calls do not. Waits for the device.

    ``shard`` must be equal on all replicas. ``ids`` are the ``[N]`` local ids to check; None for all rows.
    ``num_replicas`` is 2 or 4.
    """
    found = [torch.empty(0, dtype=torch.int64, device=shard.device)]
    with one_cut():
        for chunk in _every_chunk(shard) if ids is None else [ids]:
            is_stable = torch.ones(len(chunk), dtype=torch.bool, device=shard.device)
            for index, rows in row_chunks(shard, chunk, _CHUNK_ROWS):
                is_stable[index] = _is_stable(rows, num_replicas).all(dim=1)
            found.append(chunk[~is_stable])
    return torch.cat(found)


def _is_stable(values: Tensor, num_replicas: int) -> Tensor:
    """Return a mask that is True where the average of ``num_replicas`` equal values has the same bits as the value.

    Implementations multiply by ``1 / num_replicas`` before the addition (NCCL) or after it. Both must yield the value.
    """
    before = (values * (1 / num_replicas)) * num_replicas
    after = (values * num_replicas) * (1 / num_replicas)
    bits = bits_of(values)
    return (bits_of(before) == bits) & (bits_of(after) == bits)


def _every_chunk(shard: LocalShard) -> Iterator[Tensor]:
    num_rows = shard.spec.num_rows
    for begin in range(0, num_rows, _CHUNK_ROWS):
        yield torch.arange(begin, min(begin + _CHUNK_ROWS, num_rows), device=shard.device)
