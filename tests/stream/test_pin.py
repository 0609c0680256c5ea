"""Pins in a store: counters without listings, malformed pins, and a store that fails."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import asdict
from typing import Any

import pytest

from delta_tracker.errors import StorageError
from delta_tracker.stream.pin import (
    Pin,
    PinReader,
    free_counters,
    newest_counter,
    newest_pin,
    pin_name,
)
from delta_tracker.stream.storage.storage import Storage
from tests.stores.rules import fails, on
from tests.stores.wrapped import WrappedStorage

_HASH = "0" * 32


def pin(counter: int, **fields: Any) -> Pin:
    made = {"stream": _HASH, "kind": "pin", "version": 3, "xxh3": _HASH, "bad": 7, "reason": "", "time": 1.0} | fields
    return Pin(counter=counter, **made)


def write(storage: Storage, made: Pin) -> None:
    assert storage.create(pin_name(made.counter), made.to_json())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 100])
def test_the_newest_pin_is_found_without_a_listing(count: int) -> None:
    storage = Storage("memory://")
    for counter in range(1, count + 1):
        write(storage, pin(counter))
    for after in range(count + 1):
        before = dict(storage.requests)
        assert newest_counter(storage, after=after) == count
        sent = {name: number - before[name] for name, number in storage.requests.items()}
        assert sent["list"] == 0
        assert sent["size"] <= 2 + 2 * (count - after).bit_length()
        assert newest_pin(storage, after=after) == (pin(count) if count > after else None)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"\xff", b" " * 20_000, {"counter": 3}, {"counter": 0}, {"kind": "other"}, {"stream": "x"},
        {"version": -1}, {"version": 8}, {"kind": "release"}, {"reason": "x" * 1001}, {"time": -1}, {"bad": None},
    ],
)  # fmt: skip
def test_a_malformed_pin_is_logged_and_the_one_before_it_applies(content: object, caplog) -> None:
    storage = Storage("memory://")
    write(storage, pin(1))
    data = content if isinstance(content, bytes) else json.dumps(asdict(pin(2)) | content).encode()  # type: ignore[operator]
    storage.create(pin_name(2), data)
    with caplog.at_level(logging.WARNING):
        assert newest_pin(storage) == pin(1)
    assert [record.message.split(":")[0] for record in caplog.records] == ["ignored malformed pin"]
    write(storage, pin(3, kind="release", version=9))
    assert newest_pin(storage) == pin(3, kind="release", version=9)


def test_a_store_that_fails_keeps_the_pin_but_not_at_the_first_look() -> None:
    storage = WrappedStorage(Storage("memory://"))
    write(storage, pin(1))
    follower = PinReader(seconds=0.0)
    for _ in range(2):
        with storage.under(fails(on("size"), "down")), pytest.raises(StorageError, match="down"):
            follower.order(storage)
    assert follower.order(storage) == pin(1)
    with storage.under(fails(on("size"))):
        assert follower.order(storage) == pin(1)
    write(storage, pin(2))
    assert follower.order(storage) == pin(2)


def test_a_follower_looks_rarely() -> None:
    storage = Storage("memory://")
    follower = PinReader()
    for _ in range(100):
        assert follower.order(storage) is None
    assert storage.requests["size"] == 1


def test_a_pin_is_kept_once_its_entry_was_read_and_otherwise_while_it_is_there() -> None:
    storage, other = Storage("memory://"), Storage("memory://")
    follower = PinReader(seconds=0.0)
    write(storage, pin(1))
    assert follower.order(storage) == pin(1)
    storage.delete(pin_name(1))
    assert follower.order(storage) == pin(1), "it is looked for again after a while"
    follower.recheck(pin(1))
    assert follower.order(other) == pin(1), "another store need not have it"
    assert follower.order(storage) is None
    write(storage, pin(1, version=4))
    assert follower.order(storage) == pin(1, version=4)
    follower.confirm(pin(1, version=4))
    storage.delete(pin_name(1))
    follower.recheck(pin(1, version=4))
    assert follower.order(storage) == pin(1, version=4)
    write(storage, pin(2))
    assert follower.order(storage) == pin(2)


class Page(Storage):
    """A server that sends a log-in page for each name."""

    def size(self, name: str) -> int | None:
        self.requests["size"] += 1
        return 39


@pytest.mark.advice("StorageError: newest_counter.is_there")
def test_a_server_that_has_every_name_has_no_pin() -> None:
    storage = Page("memory://")
    with pytest.raises(StorageError, match=r"every object that is asked for.* a log-in page must become a 403 or 404"):
        newest_pin(storage)
    assert storage.requests["size"] <= 22
    assert newest_pin(Storage("memory://")) is None


@pytest.mark.parametrize("count", range(4))
def test_a_new_order_is_the_newest_for_all_readers_whatever_pins_were_forged(count: int) -> None:
    """Pins up to ``count``, and each set of forged ones above: a reader at each counter finds an order that follows."""
    for forged in itertools.chain.from_iterable(
        itertools.combinations(range(count + 1, 12), size) for size in range(4)
    ):
        storage = Storage("memory://")
        for counter in (*range(1, count + 1), *forged):
            write(storage, pin(counter))
        known = [newest_counter(storage, after=after) for after in range(count + 1)]
        counters = free_counters(storage)
        for counter in counters:
            write(storage, pin(counter, reason="right"))
        for after in {*range(count + 1), *known}:
            assert newest_pin(storage, after=after) == pin(counters[-1], reason="right"), (forged, after)
