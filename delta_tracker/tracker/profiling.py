"""Ranges in torch's profiler around what the tracker does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NO_RANGE = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a range that a running ``torch.profiler`` shows under ``name``; nothing while none runs.

    Opening a range takes microseconds even where no profiler runs, so it is not opened then.
    """
    # The flag that torch's own optimizers and data loaders ask for the same reason.
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE  # noqa: SLF001
