"""A stream of two tables, one of them with a hostile name, and what a report should find in it."""

from __future__ import annotations

import json
import math
from collections import Counter
from html.parser import HTMLParser

import pytest
import torch

from delta_tracker.cli.main import main
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.stream.streams import FQN, Writer

HOSTILE = "ec.</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"`{{7*7}}{% x %}\x1b[31m\u202e|&amp;"


class Trainer:
    """A stream of two tables, one with a hostile name, and the expected contents of a report."""

    def __init__(self, storage: Storage) -> None:
        self.writer = Writer(storage)
        self.specs = {FQN: TableSpec(FQN, 200, 4, torch.float32), HOSTILE: TableSpec(HOSTILE, 30, 3, torch.float32)}
        self.writer.dense = {"over.weight": torch.zeros(5, 2)}
        self.tables = {fqn: torch.randn(spec.num_rows, spec.dim) for fqn, spec in self.specs.items()}
        self.moves: dict[str, list[tuple[int, float]]] = {fqn: [] for fqn in self.specs}
        self.counts: dict[str, Counter[int]] = {fqn: Counter() for fqn in self.specs}
        self.unmoved: Counter[str] = Counter()
        self.manifests: list[Manifest] = []

    def move(self, fqn: str, ids: list[int]) -> None:
        """Give rows new values, except every fifth id."""
        for row in ids:
            before = self.tables[fqn][row].clone()
            if row % 5:
                self.tables[fqn][row] += torch.randn(len(before)) * 10.0 ** -(row % 3)
                self.moves[fqn].append((row, math.dist(self.tables[fqn][row].tolist(), before.tolist())))

    def snapshot(self) -> None:
        rows = [self.rows(fqn, None) for fqn in self.specs]
        self.manifests.append(self.writer.write("snapshot", rows, self.specs))

    def delta(self, **ids: list[int]) -> None:
        rows = []
        for fqn, listed in zip(self.specs, ids.values(), strict=True):
            if listed:
                self.move(fqn, listed)
                self.counts[fqn].update(listed)
                self.unmoved[fqn] += sum(row % 5 == 0 for row in listed)
                rows.append(self.rows(fqn, listed))
        self.manifests.append(self.writer.write("delta", rows, self.specs))

    def rows(self, fqn: str, ids: list[int] | None) -> BlockRows:
        spec = self.specs[fqn]
        held = self.tables[fqn].clone() if ids is None else self.tables[fqn][ids]
        form = "all" if ids is None else "list"
        block = Block(fqn, (0, spec.num_rows), (0, spec.dim), len(held), form, Encoding.F32)
        return BlockRows.of(block, None if ids is None else torch.tensor(ids), held)


def figures_of(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict:
    capsys.readouterr()
    assert main(["report", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data
