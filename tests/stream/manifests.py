"""A manifest with parts, blocks and dense tensors of several kinds."""

from __future__ import annotations

import json
from typing import Any

import torch

from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, DenseSpec, Link, Manifest, Part
from delta_tracker.stream.format.parse import parse_manifest
from delta_tracker.types import TableSpec

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


def parsed(entry: object) -> Manifest:
    return parse_manifest("log/3", json.dumps(entry).encode())


def some_entry() -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(some_manifest().to_json())
    return entry
