"""Store of the owners of one table's slots: the raw ids that a managed-collision module maps to the rows.

Notation: ``N`` is the number of ids, ``R`` the number of rows of the shard.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from delta_tracker.raw_ids import NO_OWNER, check_owners
from delta_tracker.sharding.collisions import LocalOwners
from delta_tracker.tracker.store.marked_rows import MarkedRows


class OwnerStore(MarkedRows):
    """Store that finds slots with a new owner by comparing the owners with a copy, and keeps the former owners.

    The old state of a slot is its owner before the first change in a segment, so that each consumer gets the owner of
    its own last read. The copy takes 8 bytes per slot. An MCH module's owners are compared only if the module has
    written them, a hash-ZCH module's at each call.

    An owner that a stream cannot have does not stop training: :meth:`update` marks its slot like any other, and
    :attr:`refusal` is set until the owners are valid again.

    Args:
        source: reader of the owners.
        engine: implementation of the row sets, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.

    Attributes:
        source: reader of the owners.
        refusal: reason why a stream cannot have the owners of the last :meth:`update`; an empty string if it can.
    """

    def __init__(self, source: LocalOwners, *, engine: str | None) -> None:
        super().__init__(
            source.num_rows,
            source.device,
            engine=engine,
            old_states=lambda ids: self.copy.index_select(0, ids).unsqueeze(1),
        )
        self.source = source
        self._token: object | None = None
        self._is_doubted = False
        self.refusal = ""
        self._read_all()

    def attach(self, source: LocalOwners) -> None:
        """Replace the reader, because the module was replaced. The slots and their device must be the same."""
        self.source, self._token = source, None

    def update(self, mark: Callable[[Tensor], None]) -> None:
        """Compare the owners with the copy, mark the slots that differ, and update the copy.

        Does nothing while the module has not changed the owners. Otherwise waits for the device. Takes temporary memory
        of up to 17 bytes per slot.

        Args:
            mark: function that marks slots ``[N]`` as changed in the table's own store. It is called first and only if
                there are such slots, so that a call that runs out of memory can be repeated.
        """
        if self._is_doubted:
            self.mark_unknown()
            self._is_doubted = False
        token = self.source.token()
        if token is not None and token == self._token:
            return
        owners = self.source.read()
        changed = (owners != self.copy).nonzero().flatten()
        if len(changed):
            # While the owners are refused, the unchanged ones may be at fault, too.
            refusal = self._refusal(owners, None if self.refusal else changed)
            mark(changed)
            self.mark(changed)
            with torch.inference_mode(mode=False):
                self.copy.index_copy_(0, changed, owners.index_select(0, changed))
            self.refusal = refusal
        self._token = token

    @property
    def owners(self) -> Tensor:
        """Owner of each slot at the last :meth:`update`, ``[R]`` int64. Belongs to the store: do not write to it."""
        return self.copy

    def former(self, ids: Tensor, start: int) -> Tensor:
        """Return the owner of some slots at a pinned position of the log, ``[N]`` int64. Waits for the device.

        ``ids`` are ``[N]`` int64, local, ascending and unique. All positions since ``start`` must be in the log.
        """
        former = self.copy.index_select(0, ids)
        changed = self.changed(start, self._segments[-1].start + 1)
        if len(ids) and len(changed):
            assert changed.states is not None, "this store keeps states"
            indices = torch.searchsorted(ids, changed.ids).clamp_(max=len(ids) - 1)
            found = ids.index_select(0, indices) == changed.ids
            former[indices[found]] = changed.states[found, 0]
        return former

    def mark_all_later(self) -> None:
        """Make the next :meth:`update` call :meth:`mark_unknown`. Takes no memory."""
        self._is_doubted = True

    def mark_unknown(self) -> None:
        """Mark all slots as changed. Their former owners are unknown and count as ``NO_OWNER``."""
        every = torch.arange(self.num_rows, device=self.device)
        self.mark(every, states=torch.full_like(every, NO_OWNER).unsqueeze(1))

    def forget(self) -> None:
        """Drop all marked slots and replace the copy with the current owners."""
        self.delete(None)
        self._read_all()
        self._is_doubted = False

    def _read_all(self) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self._token = self.source.token()
            self.copy = self.source.read()
        self.refusal = self._refusal(self.copy, None)

    def _refusal(self, owners: Tensor, slots: Tensor | None) -> str:
        """Return the reason why a stream cannot have the owners ``[R]`` of all slots; an empty string if it can.

        ``slots`` are the ``[N]`` local slots to check; None for all slots. The source checks all owners.
        """
        if reason := self.source.refusal():
            return reason
        begin, end = self.source.rows
        every = torch.arange(begin, end, device=owners.device) if slots is None else slots + begin
        try:
            owned = owners if slots is None else owners.index_select(0, slots)
            check_owners(self.source.identity, every, owned, is_unique=False)  # the source has checked all owners
        except ValueError as error:
            return str(error)
        return ""
