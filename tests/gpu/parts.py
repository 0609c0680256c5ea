"""Parts of the suite, the most informative first."""

from __future__ import annotations

from dataclasses import dataclass

_FOLDER = "tests/gpu"


@dataclass(frozen=True, slots=True)
class Part:
    """Files that run in one process.

    Args:
        title: title, by whose words a part is selected.
        paths: test files.
        seconds: time that the part takes on a GPU, at most; a part that takes four times as long is stopped.
        needs_fbgemm: True if the files need torchrec and fbgemm.
    """

    title: str
    paths: tuple[str, ...]
    seconds: int
    needs_fbgemm: bool = False


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"{_FOLDER}/{name}.py" for name in names)


PARTS = (
    Part("no wait for the device, and row sets", _files("test_waits", "test_row_sets"), 30),
    Part("tracking, publishing and following, with plain torch", _files("test_tracking"), 30),
    Part("no wait for the device in hooks", _files("fbgemm/test_hooks"), 40, needs_fbgemm=True),
    Part("exactness of each optimizer, placement and dtype", _files("fbgemm/test_exactness"), 90, needs_fbgemm=True),
    Part("races between streams", _files("test_races"), 20),
    Part("train pipelines on one and two ranks", _files("fbgemm/test_pipelines"), 40, needs_fbgemm=True),
    Part("stores and encoding", _files("test_stores", "test_encoding"), 20),
    Part("device metrics and predictors", _files("test_metrics", "test_apply"), 20),
    Part("quantized tables", _files("fbgemm/test_quantized"), 30, needs_fbgemm=True),
    Part("compiled lookups", _files("fbgemm/test_compile"), 40, needs_fbgemm=True),
    Part("captured lookups", _files("test_graphs"), 15),
    Part("the contract of row sets", ("tests/contract/test_row_sets.py",), 30),
    Part("more than 2^31 elements", _files("test_large"), 30),
)
