"""Commits and orders of a world: the reference for its predictors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.simulation.stores import Entry, Store
from tests.simulation.threads import SCHEDULER
from tests.simulation.trainer import Copy, num_common

Key = tuple[str, int]
"""Stream and version."""
Place = tuple[int, int]
"""Number of the stream, in the order of the promotions, and version."""


class RuleError(Exception):
    """Raised when a rule does not hold."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule, self.text = rule, text


@dataclass(frozen=True, slots=True)
class Order:
    """A pin or a release.

    Args:
        counter: number of the order, 1 for the first.
        kind: ``pin`` or ``release``.
        stream: id of the stream.
        version: version to stay at, or that of the snapshot to continue from.
        bad: newest version when the pin was written, or that of the pin that it replaces.
        time: time in seconds.
    """

    counter: int
    kind: str
    stream: str
    version: int
    bad: int
    time: float

    @classmethod
    def of(cls, fields: dict[str, Any], former: Order | None, head: Key | None) -> Order:
        """Return what the object of an order says, for the pin that applied before and the newest version."""
        newest = -1 if head is None or fields["kind"] == "release" else head[1]
        bad = max(newest, -1 if former is None else former.bad)
        return cls(fields["counter"], fields["kind"], fields["stream"], fields["version"], bad, SCHEDULER.now)


@dataclass
class History:
    """All versions and orders.

    Attributes:
        copies: the trainer's tables at each version; those of a claim are those of the version before.
        created: time at which each version was created.
        kinds: kind of each version. A claim has no rows.
        streams: ids of the streams. Each was forked from the one before it.
        head: newest version of the trainer's stream, None for none.
        orders: pins and releases, the oldest first. A promotion removes those that the mirror lacks.
        ordered: all pins and releases by their stream and counter.
        digests: hashes of the entries that each version has had.
        clock_seconds: most by which the clocks of two hosts may differ.
    """

    copies: dict[Key, Copy] = field(default_factory=dict)
    created: dict[Key, float] = field(default_factory=dict)
    kinds: dict[Key, str] = field(default_factory=dict)
    streams: list[str] = field(default_factory=list)
    head: Key | None = None
    orders: list[Order] = field(default_factory=list)
    ordered: dict[Key, Order] = field(default_factory=dict)
    digests: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    clock_seconds: float = 0.0

    def absorb(self, store: Store, copy: Copy) -> list[Entry]:
        """Record the entries that a store has after the head, and return them.

        Args:
            store: store of the trainer.
            copy: tables of the trainer.
        """
        found = store.following(-1 if self.head is None else self.head[1])
        for entry in found:
            key = entry.stream, entry.version
            if entry.stream not in self.streams:
                self.streams.append(entry.stream)
            if entry.kind != "claim":
                self.copies[key] = copy
            elif self.head in self.copies:
                self.copies[key] = self.copies[self.head]
            self.created[key], self.kinds[key], self.head = entry.created, entry.kind, key
            self.digests[entry.version].add(entry.digest)
        return found

    def written(self, stream: str, version: int) -> set[tuple[str, str]]:
        """Return the kind of a version with each tensor that it has for sure: a delta has what changed."""
        kind, tensors = self.kinds[stream, version], self.copies[stream, version].tensors
        before = self.copies.get((stream, version - 1))
        if kind == "claim" or (kind == "delta" and before is None):
            return set()
        is_whole = kind == "snapshot" or before is None or before.shapes != self.copies[stream, version].shapes
        return {(kind, name) for name, each in tensors.items() if is_whole or not each.equal(before.tensors[name])}

    def kept(self, key: Key, held: Mapping[str, Tensor], before: Mapping[str, Tensor], encoding: str | None) -> str:
        """Return which rows a reader has, but not the version, that are neither as before nor of any version."""
        found = []
        for name, tensor in held.items():
            num_rows = num_common(name, self.copies[key].tensors, held)
            rest = torch.arange(len(tensor)) >= (len(tensor) if num_rows is None else num_rows)
            for copy in (Copy(before, {}), *self.copies.values()) if rest.any() else ():
                is_same = copy is not self.copies[key]
                rest &= ~(copy.equal_rows(name, tensor, encoding) if is_same else torch.zeros_like(rest))
            if rest.any():
                found.append(f"{name} rows {rest.nonzero().flatten().tolist()}")
        return ", ".join(found)

    def has_rows(self, stream: str, versions: range, held: Mapping[str, Tensor], encoding: str | None) -> bool:
        """Return True if each row of a reader is that of one of some versions."""
        copies = [self.copies[stream, version] for version in versions if (stream, version) in self.copies]
        masks = [
            torch.stack([copy.equal_rows(name, rows, encoding) for copy in copies]).any(0)
            for name, rows in held.items()
        ]
        return all(bool(mask.all()) for mask in masks)

    def place(self, stream: str, version: int) -> Place:
        return self.streams.index(stream), version

    def without_claims(self, place: Place) -> Place:
        """Return the place of the version whose rows are those of a place."""
        number, version = place
        while self.kinds[self.streams[number], version] == "claim":
            number -= (self.streams[number], version - 1) not in self.copies
            version -= 1
        return number, version

    def newest(self, place: Place) -> int:
        """Return the newest version of the log, by which a canary counts, for a predictor at a place."""
        later = self.streams[place[0] :]
        return max(version for stream, version in self.copies if stream in later)

    @property
    def has_snapshot(self) -> bool:
        """True if the stream of the head has a snapshot; a promotion starts one without."""
        return any(key[0] == self.head[0] and kind == "snapshot" for key, kind in self.kinds.items() if self.head)

    @property
    def pin(self) -> Order | None:
        """The pin that applies, None if there is none."""
        order = self.orders[-1] if self.orders else None
        is_pin = order is not None and self.head is not None and (order.kind, order.stream) == ("pin", self.head[0])
        return order if is_pin else None

    def is_shown_by(self, stores: Iterable[Store]) -> bool:
        """Return True if stores have all orders."""
        return all(len(store.orders()) == len(self.orders) for store in stores)

    def absorb_orders(self, store: Store) -> list[Order]:
        """Record the pins and releases that a store has after the newest one, and return them."""
        found = [Order.of(each, self.pin, self.head) for each in store.orders()[len(self.orders) :]]
        self.orders += found
        self.ordered |= {(each.stream, each.counter): each for each in found}
        return found

    def returned(self, head: Key) -> dict[Key, Copy]:
        """Continue after a former head; return the tables of the versions that are lost."""
        stream, version = head
        lost = {key: copy for key, copy in self.copies.items() if key[0] == stream and key[1] > version}
        for key in lost:
            del self.copies[key], self.kinds[key], self.created[key]
        self.head = head
        return lost

    def promoted(self, store: Store, fork: Entry) -> None:
        """Continue with a stream that was forked at a mirror, whose orders count from now on."""
        assert self.head is not None, "a mirror has a version"
        key = stream, version = fork.stream, fork.version
        self.digests[version].add(fork.digest)
        before = next(former for former in reversed(self.streams) if (former, version - 1) in self.copies)
        self.copies[key], self.created[key] = self.copies[before, version - 1], SCHEDULER.now
        self.streams.append(stream)
        self.kinds[key], self.head = "claim", key
        del self.orders[len(store.orders()) :]
