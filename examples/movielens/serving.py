"""Predictor process: follows the stream and scores the next ratings with each version."""

from __future__ import annotations

import contextlib
import copy
import time

import numpy as np
import torch

from delta_tracker import Predictor
from delta_tracker.errors import NoSnapshotError
from delta_tracker.sharding.raw_id_maps import raw_id_maps
from delta_tracker.stream.format.manifest import Manifest
from examples.movielens.data import Ratings
from examples.movielens.forks import Send
from examples.movielens.metrics import serve
from examples.movielens.model import FactorizationMachine
from examples.movielens.settings import Settings

POLL_SECONDS = 0.001


def follow(send: Send, settings: Settings, ratings: Ratings) -> None:
    """Apply the versions in turn, and score with each the ratings between its cut and the next cut."""
    torch.set_num_threads(1)
    fresh = FactorizationMachine(ratings.table_rows, settings.dim, torch.device("cpu"), settings.zch).eval()
    predictor = Predictor(fresh, settings.stream.as_uri(), name="demo")
    serve(send, "predictor")
    send({"event": "ready"})

    manifest = apply_next(send, predictor, settings.patience_seconds)
    models = {"fresh": fresh, "frozen": copy.deepcopy(fresh)}
    logits = {name: torch.empty(len(ratings.labels)) for name in models}
    scored = settings.warmup_batches
    while manifest.batches[1] < settings.num_batches:
        if manifest.batches[1] != scored:
            raise RuntimeError(f"version {manifest.version} cuts at batch {manifest.batches[1]}, not at {scored}")
        first, scored = scored, min(scored + settings.every, settings.num_batches)
        stretch = slice(first * settings.batch, scored * settings.batch)
        features = fresh.jagged(ratings.ids[:, stretch])
        with torch.no_grad():
            for name, model in models.items():
                logits[name][stretch] = model(features)
        manifest = apply_next(send, predictor, settings.patience_seconds)

    after_warmup = slice(settings.warmup_batches * settings.batch, settings.num_batches * settings.batch)
    for name, values in logits.items():
        np.save(settings.work / f"{name}-logits.npy", values[after_warmup].numpy())
    for name, table in fresh.named_parameters():
        np.save(settings.work / f"predictor@{name.removesuffix('.weight')}.npy", table.detach().numpy())
    for name, (mapping,) in raw_id_maps(fresh).items():
        np.save(settings.work / f"predictor@{name}.raw_ids.npy", mapping.owners()[:, None].numpy())


def apply_next(send: Send, predictor: Predictor, patience_seconds: float) -> Manifest:
    """Wait for the next snapshot or delta, apply it, and send the time since its commit to the parent."""
    held = predictor.version
    deadline = time.monotonic() + patience_seconds
    while True:
        with contextlib.suppress(NoSnapshotError):  # the trainer is still warming up
            predictor.sync(limit=1)
        manifest = predictor.manifest
        if manifest is not None and manifest.version != held:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"no version after {held} came within {patience_seconds} seconds")
        time.sleep(POLL_SECONDS)
    send(
        {
            "event": "applied",
            "version": manifest.version,
            "kind": manifest.kind,
            "batches": manifest.batches[1],
            "num_rows": manifest.num_rows,
            "num_bytes": manifest.num_bytes,
            "evicted": sum(evicted for _, evicted in manifest.owner_changes.values()),
            "seconds": time.time() - manifest.created,
        }
    )
    return manifest
