"""Find hooks that wait for the device, also where torch does not see it: in events, FBGEMM's copies and Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from delta_tracker.sharding.watcher import Watcher

_CYCLES = 400_000_000  # 200 ms at 2 GHz


class Sleep:
    """Sleep of the device for some 200 ms, on the current stream.

    It is over after a call on the host only if the host waited for the device, or needed that long itself.
    """

    def __init__(self) -> None:
        torch.cuda._sleep(_CYCLES)
        self._end = torch.cuda.Event()
        self._end.record()

    @property
    def is_over(self) -> bool:
        """True if the sleep is over."""
        return bool(self._end.query())


@dataclass(slots=True)
class Asleep:
    """Hooks that ran while the device slept.

    Args:
        num_hooks: number of hooks.
        waiting: names of the hooks that waited for the device.
        num_others: number of waits of other code, such as the model's.
    """

    num_hooks: int = 0
    waiting: list[str] = field(default_factory=list)
    num_others: int = 0


def run_asleep(work: Callable[[], object]) -> Asleep:
    """Call ``work`` while the device sleeps. The device sleeps again for each hook after other code has waited."""
    torch.cuda.synchronize()
    contained = Watcher._contained
    found, sleep, is_inside = Asleep(), Sleep(), False

    def watched(self: Watcher, action: Any, *, otherwise: Any) -> Any:
        nonlocal sleep, is_inside
        if is_inside:  # part of a hook
            return contained(self, action, otherwise=otherwise)
        if sleep.is_over:
            found.num_others += 1
            sleep = Sleep()
        is_inside = True
        result = contained(self, action, otherwise=otherwise)
        is_inside = False
        found.num_hooks += 1
        if sleep.is_over:
            found.waiting.append(type(self).__name__)
            sleep = Sleep()
        return result

    with mock.patch.object(Watcher, "_contained", watched):
        work()
    found.num_others += sleep.is_over
    torch.cuda.synchronize()
    return found
