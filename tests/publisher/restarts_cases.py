"""Cases for ``Cadence.snapshot_every`` of trainers that load a DCP checkpoint and publish to the same stream."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import distributed as dist

from delta_tracker import Predictor, Publisher
from delta_tracker.integrations.dcp import SavedTracker
from delta_tracker.publisher.cadence import Cadence
from tests.publisher.background_cases import Trainer
from tests.publisher.publishing_cases import empty_model

_EVERY = 5


class _Life:
    """A trainer from its start to its end, and the kinds of its versions.

    Args:
        checkpoint: checkpoint to load; None for a new model.
        has_tracker: True to load the tracker's state too.
    """

    def __init__(self, rank: int, root: str, checkpoint: str | None = None, *, has_tracker: bool = True) -> None:
        self._trainer, self._root = Trainer(rank, dist.get_world_size()), root
        self.kinds: list[list[object]] = []
        if checkpoint is not None:
            path = f"{root}/{checkpoint}"
            state = {"model": self._trainer.model}
            saved = {"tracker": SavedTracker(self._trainer.tracker, path)} if has_tracker else {}
            dcp.load(state | saved, checkpoint_id=path)
        cadence = Cadence(batches=1, snapshot_every=_EVERY)
        url = f"file://{root}/stream"
        self._publisher = Publisher(self._trainer.tracker, url, cadence=cadence)
        self._held = empty_model(self._trainer.tracker)
        self._predictor = Predictor(self._held, url)

    def train(self, num_versions: int, *, by_hand: bool = False) -> None:
        """Publish versions. A predictor must equal the trainer after each of them."""
        for _ in range(num_versions):
            self._trainer.step()
            if by_hand:
                self._publisher.snapshot()
            else:
                self._publisher.step()  # votes
                self._publisher.step()  # counts the votes, and begins the version
                self._publisher.flush()
            dist.barrier()
            self._predictor.sync()
            manifest = self._predictor.manifest
            assert manifest is not None
            assert manifest.version == self._publisher.version
            self._trainer.assert_equal(manifest, self._held)
            self.kinds.append([manifest.version, manifest.kind])

    def end(self, checkpoint: str | None = None) -> list[list[object]]:
        """Save a checkpoint, close the publisher and return the kinds of the versions."""
        if checkpoint is not None:
            path = Path(self._root) / checkpoint
            dcp.save({"model": self._trainer.model, "tracker": self._trainer.tracker}, checkpoint_id=path)
        self._publisher.close()
        self._trainer.tracker.detach()
        return self.kinds


def restarts(rank: int, world_size: int, root: str) -> dict[str, list[list[object]]]:
    """Run one life after another on the same stream; return the kinds of the versions of each."""
    assert world_size == dist.get_world_size()
    found = {}
    life = _Life(rank, root)
    life.train(3)
    found["new"] = life.end("first")

    life = _Life(rank, root, "first")
    life.train(3)
    found["resumed"] = life.end("second")

    life = _Life(rank, root, "second")
    life.train(1)
    life.train(1, by_hand=True)
    life.train(3)
    found["by hand"] = life.end("third")

    life = _Life(rank, root, "third", has_tracker=False)
    life.train(2)
    found["without tracker state"] = life.end()

    life = _Life(rank, root, "third")
    life.train(2)
    found["from before a later snapshot"] = life.end("fourth")

    life = _Life(rank, root, "fourth")
    life.train(4)
    found["overdue"] = life.end()
    return found
