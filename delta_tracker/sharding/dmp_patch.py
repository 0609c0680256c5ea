"""Make the tracker methods of TorchRec's ``DistributedModelParallel`` create trackers of this library."""

import sys
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.sharding.torchrec_api import load_torchrec

_CREATES = "_init_delta_tracker"
_METHODS = ("init_torchrec_delta_tracker", "get_delta_tracker", _CREATES)


class TorchrecPatch:
    """Patch of ``DistributedModelParallel`` in this process, until :meth:`remove` or the end of a ``with`` block.

    While the patch is active, ``init_torchrec_delta_tracker(config)`` returns the model's tracker. If the model has
    none, it first stores the result of ``create(model, config)`` as the tracker. If several patches are active, the
    newest one applies. Patches may be removed in any order.

    Args:
        create: function that returns a tracker for a ``DistributedModelParallel`` and a config.

    Raises:
        MissingExtraError: if torchrec is not installed.
        InvalidArgumentError: if ``DistributedModelParallel`` has no methods for trackers, as in torchrec 1.3 and 1.4.
    """

    def __init__(self, create: Callable[[nn.Module, Any], object]) -> None:
        load_torchrec()
        self._owner = sys.modules["torchrec.distributed.model_parallel"].DistributedModelParallel
        missing = [name for name in _METHODS if not hasattr(self._owner, name)]
        if missing:
            remedy = "Call init_torchrec_delta_tracker(model, config) of delta_tracker.compat instead"
            raise InvalidArgumentError("torchrec", f"a version without the methods {missing}", remedy)
        self._original = getattr(self._owner, _CREATES)
        self._is_active = True

        def created(model: nn.Module, config: object, module: nn.Module) -> object:
            # A patch that was removed before a later one stays in the chain.
            return create(model, config) if self._is_active else self._original(model, config, module)

        self._created = created
        setattr(self._owner, _CREATES, created)

    def remove(self) -> None:
        """Undo the patch, but keep the trackers that it created. Further calls have no effect."""
        self._is_active = False
        if getattr(self._owner, _CREATES) is self._created:
            setattr(self._owner, _CREATES, self._original)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
