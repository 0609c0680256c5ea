"""Keep a stream's rows in an LMDB file, and look them up without the model.

Shows the service ``delta-tracker sink URL lmdb:///directory``, which ``Predictor(LmdbSink(directory), url)`` does in a
program of your own, and ``LmdbRows``, with which the other processes of a host read. For Redis, use
``redis://host:port/db`` and ``RedisRows``::

    python -m examples.row_store
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from delta_tracker import ModelDeltaTracker, Publisher
from delta_tracker.sinks.lmdb_rows import LmdbRows

NUM_USERS, COLUMNS = 1000, 16


def main() -> None:
    """Train and publish in this process; a child process writes the rows, and this one looks them up."""
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    url, rows_folder = (folder / "stream").as_uri(), folder / "rows"
    table = nn.EmbeddingBag(NUM_USERS, COLUMNS, sparse=True)
    model = nn.ModuleDict({"user": table})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url)
    service = [sys.executable, "-m", "delta_tracker.cli", "sink", url, rows_folder.as_uri().replace("file:", "lmdb:")]

    rows = None
    for _ in range(2):
        users = torch.randint(0, NUM_USERS, (32,))
        optimizer.zero_grad()
        table(users[:, None]).pow(2).sum().backward()
        optimizer.step()
        tracker.step()
        version = publisher.publish()
        # --once ends when the rows have the newest version; as a service, the command runs until SIGTERM
        subprocess.run([*service, "--once"], check=True, capture_output=True, timeout=240)

        rows = LmdbRows(str(rows_folder)) if rows is None else rows
        found = rows.rows("user", users)  # one read transaction: all rows are of one moment
        assert rows.state().version == version.version
        assert torch.equal(found.values, table.weight[users])
        assert int(found.versions.max()) == version.version  # the version that wrote a row is stored with it
    publisher.close()
    if rows is not None:
        rows.close()
    print(f"version {version.version}: the rows in the file equal the trainer's bit for bit")


if __name__ == "__main__":
    main()
