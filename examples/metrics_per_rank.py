"""Count clicks on each rank, save with DCP on four ranks, and continue on two, with the same total.

Needs neither TorchRec nor an embedding table. Starts its own ranks: ``python -m examples.metrics_per_rank``
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings

import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torchmetrics import MaxMetric, SumMetric

from delta_tracker import RankCounters
from delta_tracker.integrations.dcp import SavedCounters


def train(path: str, *, resumes: bool) -> None:
    """Count on this rank, and print the totals of all ranks. Save the first time, load the second time."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, clicks, longest = torch.nn.Linear(2, 1), SumMetric(), MaxMetric()
    counters = RankCounters({"clicks": clicks, "longest": longest})
    if resumes:
        dcp.load({"counters": SavedCounters(counters, path), "model": model}, checkpoint_id=path)
    else:
        clicks.update(10.0**rank)  # each rank sees other data
        longest.update(7.0 * rank)
        dcp.save({"counters": counters, "model": model}, checkpoint_id=path)
    own = float(clicks.sum_value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchmetrics warns of a metric without updates in this process
        totals = float(clicks.compute()), float(longest.compute())  # over all ranks
    assert totals == (1111.0, 21.0), totals
    line = f"rank {rank} of {dist.get_world_size()}: {own:.0f} clicks of {totals[0]:.0f}, longest {totals[1]:.0f}\n"
    sys.stdout.write(line)  # one write, so that lines of ranks do not mix
    dist.destroy_process_group()


def launch(num_ranks: int, *arguments: str) -> None:
    """Run this program on several ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    subprocess.run([*launcher, "-m", "examples.metrics_per_rank", *arguments], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], resumes=sys.argv[2] == "resume")
    else:
        with tempfile.TemporaryDirectory() as folder:
            launch(4, folder, "save")
            launch(2, folder, "resume")
