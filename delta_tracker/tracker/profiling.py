"""Named ranges that show the tracker's work in torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NO_RANGE = nullcontext()


def profiler_range(name: str) -> AbstractContextManager[object]:
    """Return a context manager that ``torch.profiler`` records as a range called ``name``.

    Returns a null context if no profiler is running.
    """
    # Opening a range takes microseconds even if no profiler is running. torch's optimizers and data loaders check this
    # flag for the same reason.
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_RANGE  # noqa: SLF001
