"""Order between a kernel's prefetches and other work on its cached rows.

With ``PrefetchTrainPipelineSparseDist``, FBGEMM loads the rows of later batches into a kernel's cache on a separate
stream, while other streams run. A flush first reads which row is in a slot of the cache, then copies the slot to this
row. If a prefetch loads another row into the slot in between, the flush overwrites the first row with the second one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_NO_PREFETCHES = nullcontext()


def between_prefetches(kernel: Any) -> AbstractContextManager[None]:  # noqa: ANN401  one of several classes of FBGEMM
    """Return a context manager for launches that run after the kernel's earlier prefetches and before its later ones.

    The current stream waits for the prefetch stream, and at the end the prefetch stream for the current stream. The
    thread does not wait. No-op for a kernel that has not prefetched on a separate stream. No thread may launch a
    prefetch inside the ``with`` statement. This was not run on a GPU.

    Args:
        kernel: FBGEMM's module.
    """
    prefetches = getattr(kernel, "prefetch_stream", None)
    return _NO_PREFETCHES if prefetches is None else _between(prefetches)  # avoids the time of a generator


@contextmanager
def _between(prefetches: Any) -> Iterator[None]:  # noqa: ANN401  torch's stubs have no common type
    current = torch.cuda.current_stream(prefetches.device)
    current.wait_stream(prefetches)
    try:
        yield
    finally:
        prefetches.wait_stream(current)
