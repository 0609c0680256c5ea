"""The previous release of the library beside a world: one process for all worlds of a program.

It sees the stores as directories. No thread of the world runs while it is asked.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.releases.release import Release, ReleaseError, start, unpack
from tests.simulation.history import History, RuleError
from tests.simulation.stores import Store
from tests.simulation.targets import reached
from tests.simulation.trainer import SHAPES, Copy, in_stream

PREVIOUS: Counter[str] = Counter()
"""Number of streams that the previous release has read, and of versions that it has published."""


@cache
def previous() -> Release | None:
    """Return the previous release; None, with a printed reason, if it cannot run. Call it outside of a world."""
    folder = Path(tempfile.mkdtemp(prefix="release-"))
    if problem := unpack(folder):
        folder.rmdir()
        print(f"nothing is read by the previous release: {problem}", flush=True)
        return None
    return Release.of(start(folder, is_temporary=True), folder)


def check_previous(release: Release, store: Store, history: History, encoding: str | None) -> str:
    """Check that a predictor of the previous release gets the rows of the newest version of a store.

    It is a new one, without a canary, a gate and pins. Raise RuleError if it gets others, or none.
    """
    entries = store.entries()
    stream = max((each.stream for each in entries if each.kind == "snapshot"), key=history.streams.index, default=None)
    if stream is None:
        return "no snapshot"
    is_waiting = any(history.streams.index(each.stream) > history.streams.index(stream) for each in entries)
    newest = max(reached([each for each in entries if each.stream == stream], None))
    copy = history.copies[stream, newest]
    shapes = {in_stream(name): shape for name, shape in copy.shapes.items()}
    try:
        found = release.serve(store.url, shapes)
    except ReleaseError as error:
        if is_waiting and error.kind == "NoSnapshotError":  # a promotion has started another stream
            return "no snapshot"
        raise RuleError("previous release", f"version {newest} of {store.path.name} is refused: {error}") from error
    place = history.without_claims(history.place(found["stream"], found["version"]))
    if place != history.without_claims(history.place(stream, newest)):
        raise RuleError("previous release", f"it reads {place} of {store.path.name} instead of version {newest}")
    held = {name: _tensor_of(found["tensors"][in_stream(name)]) for name in copy.shapes}
    difference = history.copies[found["stream"], found["version"]].difference(held, encoding)
    if difference is not None:
        raise RuleError("previous release", f"it reads version {newest} of {store.path.name}, but {difference}")
    PREVIOUS["read"] += 1
    return f"version {newest} of {store.path.name}"


def begin_with_previous(
    release: Release, store: Store, history: History, number: int, seeds: Sequence[int], *, is_recoverable: bool
) -> str:
    """Let a trainer of the previous release publish the first versions of a store, and record them.

    Args:
        release: the previous release.
        store: store without a stream.
        history: what was committed, which is nothing.
        number: number of the model of the trainer, see :data:`~tests.simulation.trainer.SHAPES`.
        seeds: seed of the batch before each version.
        is_recoverable: True to publish the states of the optimizer.
    """
    published = release.publish_tables(store.url, SHAPES[number], seeds, is_recoverable=is_recoverable)
    copies = [Copy(_tensors_of(each["tensors"]), _tensors_of(each["states"])) for each in published]
    store.date()
    entries = [each for each in history.absorb(store, copies[-1]) if each.kind != "claim"]
    for entry, copy in zip(entries, copies, strict=True):
        history.copies[entry.stream, entry.version] = copy
    PREVIOUS["published"] += len(copies)
    return f"the previous release publishes up to {entries[-1].version}"


def _tensor_of(bits: Sequence[Any]) -> Tensor:
    """Return the float32 values with the bits of these lists."""
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def _tensors_of(found: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
    return {name: _tensor_of(each) for name, each in found.items()}
