"""Serve rows with FastAPI from tables that a predictor updates in a thread.

Shows ``predictor.follow()`` in the service's lifespan, ``predictor.reading()`` around the lookups of a request, and a
health endpoint with the lag. Run each line in its own terminal::

    python -m examples.service publish file:///tmp/stream
    python -m examples.service serve file:///tmp/stream --port 8000
    curl 'http://127.0.0.1:8000/rows?ids=1&ids=42'; curl http://127.0.0.1:8000/health
    wrk --script examples/service.lua --latency http://127.0.0.1:8000

The trainer adds 1 to every row in each batch and publishes each batch, so that clients can check the rows.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Response
from torch import nn

from delta_tracker import ModelDeltaTracker, Predictor, Publisher

NUM_ROWS, COLUMNS = 20_000, 8
TABLE = "embedding_bags.item"


def create_app(url: str) -> FastAPI:
    """Return the service, for any ASGI server; each process of it has its own table and name."""
    table = nn.EmbeddingBag(NUM_ROWS, COLUMNS)
    predictor = Predictor({TABLE: table.weight}, url, name=f"{socket.gethostname()}-{os.getpid()}")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with predictor:
            predictor.follow()
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/rows")
    def rows(ids: Annotated[list[int], Query()]) -> dict[str, object]:
        """Return rows, some of them possibly of the version being applied. Not async, so that it runs in a thread."""
        with torch.no_grad(), predictor.reading() as held:
            found = [table.weight[item].tolist() for item in ids]  # no row changes from one lookup to the next
        if held.version is None:
            raise HTTPException(503, "no version has been applied yet")
        return {"version": held.version, "applying": held.applying, "rows": found}

    @app.get("/health")
    def health(response: Response) -> dict[str, object]:
        """Return 200 once a version is applied.

        An error is no reason for 503: a held version or a store that fails reaches all workers at once, and each still
        serves its last version. Alert on the error and the lag.
        """
        status = predictor.status()
        response.status_code = 503 if status.version is None else 200
        return {
            "version": status.version,
            "lag_versions": status.lag_versions,
            "lag_seconds": status.lag_seconds,
            "resyncs": status.resyncs,
            "error": status.error,
        }

    return app


def publish(url: str, pause_seconds: float) -> None:
    """Train until Ctrl-C: each batch adds 1 to every row and is published as a version."""
    from torch import distributed as dist  # noqa: PLC0415  the service does not need it
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: PLC0415
    from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: PLC0415
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward  # noqa: PLC0415

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = EmbeddingBagConfig(
        name="item", num_embeddings=NUM_ROWS, embedding_dim=COLUMNS, feature_names=["item"], init_fn=nn.init.zeros_
    )
    collection = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 1.0})
    model = DistributedModelParallel(collection, device=torch.device("cpu"))
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url)
    every = KeyedJaggedTensor(["item"], torch.arange(NUM_ROWS), lengths=torch.ones(NUM_ROWS, dtype=torch.int64))
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())  # Ctrl-C stops it between two versions
    while not stop.wait(pause_seconds):
        model(every).values().sum().neg().backward()
        tracker.step()
        print(f"version {publisher.publish().version}", flush=True)
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["publish", "serve"])
    parser.add_argument("url", help="url of the stream")
    parser.add_argument("--port", type=int, default=8000, help="port of the service")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two batches of the trainer")
    arguments = parser.parse_args()
    if arguments.role == "publish":
        publish(arguments.url, arguments.pause)
    else:
        uvicorn.run(create_app(arguments.url), host="127.0.0.1", port=arguments.port, log_level="warning")
