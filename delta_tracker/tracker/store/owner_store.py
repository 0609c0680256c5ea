"""Row store for the owners of a table's slots. A managed-collision module maps the owner, a raw id, to its slot (row).

Notation: ``N`` is the number of ids, ``R`` the number of rows of the shard.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from delta_tracker.raw_ids import NO_OWNER, check_owners
from delta_tracker.sharding.collisions import LocalOwners
from delta_tracker.tracker.store.marked_rows import MarkedRows


class OwnerStore(MarkedRows):
    """Row store that records which slots (rows) of a table with managed collisions have a new owner.

    :meth:`update` compares the owners with a copy to find these slots. The copy takes 8 bytes per slot. The owners of
    an MCH module are compared only after the module wrote them. The owners of a hash-ZCH module are compared in each
    call. The old state of a slot is its owner before its first change in a segment.

    Training continues if an owner cannot be published. :meth:`update` marks the slot of this owner, and sets
    :attr:`refusal` until all owners are valid again.

    Args:
        source: reader of the module's owners.
        engine: name of the row set implementation, see :func:`~delta_tracker.tracker.row_sets.engines.choose_engine`.

    Attributes:
        source: reader of the module's owners.
        refusal: reason why the owners of the last :meth:`update` cannot be published; empty if they can be published.
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
        self._marks_all = False
        self.refusal = ""
        self._read_all()

    def attach(self, source: LocalOwners) -> None:
        """Replace the source of the owners after the module was replaced. The slots and device must be the same."""
        self.source, self._token = source, None

    def update(self, mark: Callable[[Tensor], None]) -> None:
        """Compare the owners with the copy, mark the slots that differ, and update the copy.

        Makes no comparison if the module has not written the owners since the last call. Otherwise, waits for the
        device. Takes temporary memory of up to 17 bytes per slot. A call that runs out of memory can be repeated.

        Args:
            mark: function that marks slots ``[N]`` as changed in the table's row store. Called only if slots differ.
        """
        if self._marks_all:
            self.mark_unknown()
            self._marks_all = False
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
        """Owner of each slot as of the last :meth:`update`, ``[R]`` int64. Do not write to this tensor."""
        return self.copy

    def former(self, ids: Tensor, start: int) -> Tensor:
        """Return the owners ``[N]`` int64 of the slots ``ids`` at the pinned position ``start``. Waits for the device.

        ``ids`` is ``[N]`` int64, unique local ids in ascending order. The segments since ``start`` must still exist.
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
        """Make the next :meth:`update` call :meth:`mark_unknown`. Allocates no memory."""
        self._marks_all = True

    def mark_unknown(self) -> None:
        """Mark all slots as changed. Their former owners are unknown, and are reported as ``NO_OWNER``."""
        every = torch.arange(self.num_rows, device=self.device)
        self.mark(every, states=torch.full_like(every, NO_OWNER).unsqueeze(1))

    def reset(self) -> None:
        """Drop all marked slots and replace the copy with the current owners."""
        self.delete(None)
        self._read_all()
        self._marks_all = False

    def _read_all(self) -> None:
        with torch.inference_mode(mode=False), torch.no_grad():
            self._token = self.source.token()
            self.copy = self.source.read()
        self.refusal = self._refusal(self.copy, None)

    def _refusal(self, owners: Tensor, slots: Tensor | None) -> str:
        """Check whether owners ``[R]`` can be published. Return the reason if they cannot, or an empty string.

        ``slots`` are the local slots to check, ``[N]``; None for all slots. The checks of the source cover all owners.
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
