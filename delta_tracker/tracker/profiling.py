"""Ranges for torch's profiler around the tracker's work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NO_RANGE = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a range that ``torch.profiler`` shows under ``name``, or a null context if no profiler is running.

    A range takes microseconds to open even if no profiler is running.
    """
    # torch's own optimizers and data loaders check this flag for the same reason.
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE  # noqa: SLF001
