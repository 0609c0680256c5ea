"""States of the global random generators of a process: :class:`RandomStates`."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from delta_tracker.errors import InvalidArgumentError

_LOADERS: dict[str, Callable[[Any], object]] = {
    "torch": torch.set_rng_state,
    "cuda": torch.cuda.set_rng_state_all,
    "random": random.setstate,
    "numpy": np.random.set_state,
}


class RandomStates:
    """States of the global random generators of torch (CPU and all CUDA devices), Python and numpy.

    If training uses these generators, for example for dropout, pass an instance to the publisher and to ``restore``::

        rank_state = {"random": RandomStates()}

    A torch data loader draws a number from torch's CPU generator whenever an iterator is created. A resumed job creates
    one iterator more than the original job. Pass a separate ``generator`` to the loader to avoid this difference.
    Saving and restoring the states of CUDA devices has not been tested on a GPU.

    Example:
        >>> import random
        >>> states = RandomStates()
        >>> saved = states.state_dict()
        >>> number = random.random()
        >>> states.load_state_dict(saved)
        >>> random.random() == number
        True
    """

    def state_dict(self) -> dict[str, object]:
        """Return the current states of all generators."""
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "random": random.getstate(),
            "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  the global generator
        }

    def load_state_dict(self, state: Any) -> None:  # noqa: ANN401  validated below
        """Restore ``state``, a result of :meth:`state_dict`.

        Raises InvalidArgumentError and changes nothing if a state is invalid or the number of CUDA devices differs.
        """
        if not isinstance(state, dict) or state.keys() != _LOADERS.keys():
            found = sorted(map(str, state)) if isinstance(state, dict) else type(state)
            raise InvalidArgumentError("state", found, f"Pass what state_dict() returned, with {sorted(_LOADERS)}")
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not isinstance(state["cuda"], list) or len(state["cuda"]) != devices:
            remedy = f"Restore on a host with as many CUDA devices; this one has {devices}"
            saved = len(state["cuda"]) if isinstance(state["cuda"], list) else type(state["cuda"])
            raise InvalidArgumentError("state['cuda']", saved, remedy)
        before = self.state_dict()
        for name, load in _LOADERS.items():
            try:
                load(state[name])
            except (TypeError, ValueError, RuntimeError, LookupError, OverflowError) as error:
                for each, load_former in _LOADERS.items():
                    load_former(before[each])
                remedy = f"Pass what state_dict() returned, with the same versions of Python, torch and numpy: {error}"
                raise InvalidArgumentError(f"state[{name!r}]", type(state[name]), remedy.rstrip(".")) from error
