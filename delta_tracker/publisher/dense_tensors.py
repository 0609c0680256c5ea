"""Dense tensors that this rank writes to its versions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.sharding.dense import dense_tensors
from delta_tracker.stream.format.manifest import DTYPE_NAMES, MAX_DIMS
from delta_tracker.tracker.live_tables import LiveTables


class DenseTensors:
    """Choice of dense tensors: those of a module, or names of some in the model's ``state_dict``."""

    def __init__(self, live: LiveTables, choice: nn.Module | Iterable[str], *, is_first: bool) -> None:
        self._live = live
        self._choice = choice if isinstance(choice, nn.Module | str) else tuple(choice)
        self._is_first = is_first
        self.find()

    def find(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes, by name, without copying them; empty on ranks other than 0.

        Raises:
            InvalidArgumentError: if the model has no such tensor, or if it has an unsupported dtype or number of
                dimensions. Raised by the constructor, too.
        """
        if not self._is_first:
            return {}
        found = dense_tensors(self._live.model, self._choice, tables=self._live.tables)
        for name, tensor in found.items():
            if tensor.dtype not in DTYPE_NAMES or tensor.dim() > MAX_DIMS:
                remedy = f"Leave it out: streams do not support {tensor.dim()}-d {tensor.dtype}"
                raise InvalidArgumentError("dense", name, remedy)
        return found
