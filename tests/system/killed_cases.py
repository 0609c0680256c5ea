"""A predictor with tables in files, killed at each step in turn: ``python -m tests.system.killed_cases ROOT 1``.

Each killed life is a fork of this process, which only has the imports. After it, sometimes after a second kill, a life
that is not killed must end with the tables at the stream's end.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from delta_tracker import ModelTarget, Predictor
from delta_tracker.predictor.served_model import Receiver
from delta_tracker.row_target import TensorTarget
from delta_tracker.stream.format.part_reader import Contents
from delta_tracker.stream.storage.storage import Storage
from tests.stores.rules import calls, on
from tests.stores.wrapped import WrappedStorage

SHAPES = {"a": (12, 4), "b": (7, 8), "w": (3,), "x": (3,)}
DTYPES = {"a": torch.float32, "b": torch.bfloat16, "w": torch.float32, "x": torch.int64}
ROLLED_BACK_TO = 5
_write_dense = Receiver.write_dense
SCENARIOS = ("onwards", "from nothing", "rollback")


class Steps:
    """Counts steps, and kills the process at a given one."""

    def __init__(self, last: int | None) -> None:
        self.last = last
        self.is_counting = True
        self.counts: Counter[str] = Counter()

    def __call__(self, kind: str) -> None:
        self.counts[kind] += self.is_counting
        if self.is_counting and self.counts.total() == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


class _Target(TensorTarget):
    steps: Steps

    def write(self, ids, values, columns) -> None:
        """Write each row in two halves."""
        first, end = columns
        middle = (first + end) // 2
        self.steps("before a chunk")
        super().write(ids, values[:, : middle - first], (first, middle))
        self.steps("within a chunk")
        super().write(ids, values[:, middle - first :], (middle, end))


def table(path: Path) -> Tensor:
    """Map a tensor in a file, which later lives map again."""
    shape, dtype = SHAPES[path.name], DTYPES[path.name]
    return torch.from_file(str(path), shared=True, size=int(torch.Size(shape).numel()), dtype=dtype).view(shape)


def live(root: Path, scenario: str, last: int | None) -> Counter[str]:
    """Run one life of a predictor from the state in ``root/kept`` to the stream's end."""
    kept, steps = root / "kept", Steps(last)
    place = kept / "place.json"
    model: dict[str, Any] = {name: table(kept / name) for name in SHAPES}
    for name in ("a", "b"):
        model[name] = _Target.of(model[name])
        model[name].steps = steps
    storage = WrappedStorage(
        Storage(root / "stream"),
        calls(on("read"), before=lambda _: steps("before a read")),
        calls(on("names", "objects"), before=lambda _: steps("before a listing")),
    )
    predictor = Predictor(ModelTarget(model, chunk_rows=12), storage)

    def write_dense_between_steps(receiver: Receiver, contents: Contents) -> None:
        steps("before dense tensors")
        _write_dense(receiver, contents)
        steps("after dense tensors")

    Receiver.write_dense = write_dense_between_steps

    def keep() -> None:
        """Save the state as :meth:`Predictor.state_dict` documents."""
        steps("before the place is written")
        (kept / "draft").write_text(json.dumps(predictor.state_dict()))
        steps("before the place is renamed")
        (kept / "draft").rename(place)
        steps("after the place is renamed")

    steps.is_counting = scenario != "rollback"
    if place.exists():
        predictor.load_state_dict(json.loads(place.read_text()))
    version = None
    while version != predictor.version or version is None:
        version = predictor.version
        predictor.sync(limit=1)
        keep()
    if scenario == "rollback":
        steps.is_counting = True
        place.unlink()
        steps("after the place is removed")
        predictor.rollback(ROLLED_BACK_TO)
        keep()
        predictor.release()
        predictor.sync()
        keep()
    return steps.counts


def fork(life: Callable[[], Counter[str]], report: Path) -> int:
    """Run a life in a separate process; return its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            report.write_text(json.dumps(life()))
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Recovery:
    """A process that runs all restarts, because starting one takes most of the time."""

    def __init__(self, root: Path) -> None:
        request, self._request = os.pipe()
        self._answer, answer = os.pipe()
        self._child = os.fork()
        if self._child == 0:
            os.close(self._request)
            try:
                while os.read(request, 1):
                    live(root, "onwards", None)
                    os.write(answer, b".")
            finally:
                os._exit(0)
        os.close(answer)
        os.close(request)

    def __call__(self) -> None:
        os.write(self._request, b".")
        assert os.read(self._answer, 1), "the restart failed"

    def close(self) -> None:
        os.close(self._request)
        os.waitpid(self._child, 0)


def main(root: Path, every: int) -> None:
    """Print the number of steps of each kind by scenario; fail if a life ends with other tables.

    Args:
        root: folder of the stream, of the state at its begin, and of the expected tables.
        every: 1 to kill at each step, n to kill at each n-th.
    """
    torch.set_num_threads(1)
    gc.freeze()
    recover = Recovery(root)
    expected = {name: (root / "expected" / name).read_bytes() for name in SHAPES}
    chance = random.Random(0)
    found = {}
    for number, scenario in enumerate(SCENARIOS):
        for num_lives, last in enumerate(itertools.count(1 + number % every, every), 1):
            shutil.rmtree(root / "kept", ignore_errors=True)
            shutil.copytree(root / "begin", root / "kept")
            if scenario == "from nothing":
                (root / "kept" / "place.json").unlink()
            status = fork(lambda: live(root, scenario, last), root / "report")  # noqa: B023  called at once
            if status == 0:
                break
            assert status == -signal.SIGKILL, status
            if num_lives % 8 == 0:
                again = chance.randrange(1, 40)
                assert fork(lambda: live(root, "onwards", again), root / "report") in (0, -signal.SIGKILL)  # noqa: B023
            recover()
            for name, content in expected.items():
                assert (root / "kept" / name).read_bytes() == content, (scenario, last, name)
        counts = json.loads((root / "report").read_text())
        assert last - every <= sum(counts.values()) < last, "each step was the last one once"
        found[scenario] = counts
    recover.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
