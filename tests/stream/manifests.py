"""A manifest with parts, blocks and dense tensors of several kinds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import STATES_FORMAT, Block, DenseSpec, Link, Manifest, Part, Stored
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.types import Bucket, Identity, StateSpec, TableSpec, TableStates

HASH = "0123456789abcdef" * 2


TABLES = {"t": TableSpec("t", 10, 4, torch.float32), "h": TableSpec("h", 6, 8, torch.bfloat16)}


def some_manifest() -> Manifest:
    blocks = (
        Block("h", (0, 6), (0, 8), 6, "list", Encoding.BF16),
        Block("t", (5, 10), (0, 4), 2, "list", Encoding.F32),
        Block("t", (0, 5), (0, 4), 0, "gaps", Encoding.INT4),
    )
    return Manifest(
        stream="0" * 32,
        generation=1,
        writer="f" * 32,
        version=3,
        kind="delta",
        parent=Link(2, HASH),
        snapshot=1,
        batches=(2, 5),
        cut=1.25,
        created=1.5,
        tables=TABLES,
        dense={"w": DenseSpec(torch.float32, (3, 2)), "n": DenseSpec(torch.int64, ())},
        parts=(Part("parts/p.safetensors", 1000, HASH, blocks, ("w", "n")),),
    )


def states_manifest() -> Manifest:
    """Return an entry of format 2, with a table with states, one whose optimizer keeps none, and one with raw ids."""
    blocks = (
        Block("t", (5, 10), (0, 3), 2, "list", Encoding.F32),
        Block("t", (0, 10), (3, 4), 0, "gaps", Encoding.F32),
        Block("h", (0, 6), (0, 8), 6, "list", Encoding.INT8),
    )
    owned = (
        Block("u", (0, 2), (0, 2), 1, "gaps", Encoding.INT4),
        Block("u", (2, 3), (0, 2), 1, "all", Encoding.INT4),
    )
    sums, moments = StateSpec("sum", torch.float32, "range"), StateSpec("m", torch.bfloat16, "columns")
    states = {
        "t": TableStates("EXACT_ROWWISE_ADAGRAD", ((0, 3), (3, 4)), (sums, moments)),
        "h": TableStates("EXACT_SGD", ((0, 4), (4, 8)), ()),
    }
    parts = (
        Part("parts/p.safetensors", 1016, HASH, blocks, ("w",), 1000, Stored("parts/s.safetensors", 66, 50, HASH)),
        Part("parts/q.safetensors", 516, HASH, owned, ("n",), 500),
    )
    training = tuple(Stored(f"parts/t{rank}.safetensors", 8_388_641, 8_388_609, HASH) for rank in range(2))
    tables = TABLES | {"u": TableSpec("u", 3, 2, torch.float16)}
    manifest = replace(some_manifest(), tables=tables, parts=parts, training=training, event_time=1.5)
    identities = {"u": Identity(100, (Bucket((0, 2), 1), Bucket((2, 3), 2)))}
    return replace(manifest, format=STATES_FORMAT, states=states, identities=identities, owner_changes={"u": (2, 1)})


def parsed(entry: object) -> Manifest:
    return parse_manifest("log/3", json.dumps(entry).encode())


def some_entry() -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(some_manifest().to_json())
    return entry
