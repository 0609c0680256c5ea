"""Families of states of a reader: all small logs, views of them, orders and faults. Nothing is drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import permutations, product

from delta_tracker.stream.format.manifest import Link, Manifest
from delta_tracker.stream.reading.orders import Order, OrderPolicy
from tests.stream.reading.logs import Log, entry_of, generation_of, merged_entries, stream_of
from tests.stream.reading.readers import Reader, World, ahead_of, at, mixed_at

State = tuple[World, Reader]

_FAULTS = ("missing", "malformed", "unreadable", "corrupt", "lost")
_PINS = OrderPolicy(follows_pins=True)


def words(size: int, letters: str = "sdc") -> Iterator[str]:
    """Yield the words of a log with up to ``size`` entries after its first claim."""
    for length in range(size + 1):
        yield from ("c" + "".join(tail) for tail in product(letters, repeat=length))


def _prefixes(word: str) -> list[str]:
    """Return the entries of a word that a reader may have applied."""
    return [word[:end] for end in range(1, len(word) + 1) if "s" in word[len(stream_of(word[:end])) : end]]


def readers(word: str, *, is_short: bool = False) -> Iterator[Reader]:
    """Yield the readers that have applied an entry of a word, or none, also those that were interrupted or restarted.

    Args:
        word: the word.
        is_short: True for fewer kinds of interrupted readers.
    """
    yield Reader()
    for prefix in _prefixes(word):
        yield at(prefix)
        yield at(prefix, is_loaded=True)
        yield mixed_at(prefix)
        later = [each for each in _prefixes(word) if len(each) > len(prefix) and _is_one_writer(prefix, each)]
        for ahead in later[-1:] if is_short else later:
            yield ahead_of(prefix, ahead)
            if not is_short:
                yield ahead_of(prefix, ahead, is_loaded=True)


def _is_one_writer(word: str, later: str) -> bool:
    return generation_of(word) == generation_of(later)


def _retained(word: str) -> list[int]:
    """Return the lowest versions that retention may have kept: all, or those from the newest snapshot on."""
    newest = word.rfind("s")
    return [0, newest] if newest > 1 else [0]


def _merged(word: str) -> list[tuple[Manifest, ...]]:
    return [(), *((each,) for each in merged_entries(word))]


def one_url(size: int) -> Iterator[State]:
    """Yield states of one log with one fault: kinds of entries, merged entries, retention, canary, interrupted rows."""
    for word in words(size):
        for first, merged in product(_retained(word), _merged(word)):
            names = [word[:end] for end in range(1, len(word) + 1)]
            faults: list[dict[str, str]] = [{}, *({n: f} for n, f in product(names, _FAULTS))]
            faults += [{each.xxh3: f} for each, f in product(merged, ("malformed", "corrupt", "lost"))]
            for fault, behind in product(faults, (0, 1, 2)):
                world = World((Log(word, merged, first, fault),))
                yield from ((world, replace(reader, behind=behind)) for reader in readers(word))
                if not behind and not merged:
                    world = replace(world, is_cached=True)
                    yield from ((world, reader) for reader in readers(word))


def far_behind(size: int) -> Iterator[State]:
    """Yield states of one log without faults: retention, a canary or a cache, and readers many versions behind."""
    for word in words(size, "sd"):
        for first, merged in product(_retained(word), _merged(word)):
            log = Log(word, merged, first)
            for reader in readers(word, is_short=True):
                yield World((log,)), reader
                yield World((log,)), replace(reader, behind=1)
                yield World((log,), is_cached=True), reader


def gates(size: int) -> Iterator[State]:
    """Yield states of one log with one or two versions that the gate rejects, and all merged entries."""
    for word in words(size, "sd"):
        names = [word[:end] for end in range(2, len(word) + 1)]
        bad = [frozenset({one, other}) for one, other in product(names, names) if one <= other]
        for each, merged, first, sees in product(bad, _merged(word), _retained(word), (True, False)):
            log = Log(word, merged, first)
            for reader in readers(word, is_short=True):
                yield World((log,), each, sees), reader


def _orders(word: str) -> Iterator[Order]:
    """Yield the pins and releases of the last stream of a word."""
    stream = stream_of(word)
    for end in range(len(stream) + 1, len(word) + 1):
        link = Link(end - 1, word[:end])
        yield Order(1, "pin", stream, end - 1, link, len(word) - 1)
        if word[end - 1] == "s":
            yield Order(2, "release", stream, end - 1, link, max(0, end - 2))


def orders(size: int, *, is_short: bool = False) -> Iterator[State]:
    """Yield states of one log with a pin, a release or an own rollback, with one fault.

    Args:
        size: see :func:`words`.
        is_short: True for snapshots and deltas without faults and merged entries.
    """
    for word in words(size, "sd" if is_short else "sdc"):
        names = [word[:end] for end in range(1, len(word) + 1)]
        for order, merged in product(_orders(word), [()] if is_short else _merged(word)):
            faults: list[dict[str, str]] = [{}, *({n: f} for n, f in product(names, ("malformed", "corrupt")))]
            if not merged:
                faults += [{n: f} for n, f in product(names, ("missing", "unreadable", "lost"))]
            for fault, first in product(faults[:1] if is_short else faults, _retained(word)):
                world = World((Log(word, merged, first, fault, (order,)),))
                for reader in readers(word, is_short=True):
                    yield world, replace(reader, policy=_PINS)
                    yield world, replace(reader, policy=_PINS, behind=1)
                    yield world, reader
                    own = replace(order, kind="rollback", link=None)
                    yield world, replace(reader, policy=replace(_PINS, own=own))
                    yield world, replace(reader, policy=replace(_PINS, own=replace(own, counter=0)))
                    yield world, replace(reader, policy=replace(_PINS, released=order))
    for word in words(size - 1, "sd"):
        forged = Order(3, "pin", stream_of(word), len(word) - 1, Link(len(word) - 1, "forged"), len(word) - 1)
        for reader in readers(word, is_short=True):
            yield World((Log(word, orders=(forged,)),)), replace(reader, policy=_PINS)


def late_claims(size: int) -> Iterator[State]:
    """Yield states of a log with a claim at a name that retention has made free."""
    for word in words(size):
        first = word.rfind("s")
        for prefix in _prefixes(word):
            following = len(prefix)
            if following >= first or word[following] != "d" or word[following + 1] == "c":
                continue
            log = Log(word, first=first, late=entry_of(prefix + "c"))
            for behind in (0, 1):
                yield World((log,)), at(prefix, behind=behind)
                yield World((log,)), mixed_at(prefix, behind=behind)


def _is_history(one: str, other: str) -> bool:
    """Return True if two words can exist: where they part, another publisher has claimed one of them."""
    same = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return same is None or same == 0 or one[same] in "cf" or other[same] in "cf"


def views(trunk: str, size: int) -> Iterator[Log]:
    """Yield what a url may show of a stream: behind, ahead, diverged, promoted, another stream, nothing, no answer."""
    yield Log("")
    yield Log(trunk, is_up=False)
    yielded = set()
    for end in range(2, len(trunk) + 1):
        tails = ["", *("".join(t) for n in range(1, size + 1) for t in product("sdcf", repeat=n))]
        for tail in tails:
            word = trunk[:end] + tail
            if word in yielded or not _is_history(word, trunk) or (tail and tail[0] not in "cf" and end < len(trunk)):
                continue
            yielded.add(word)
            for first in _retained(word):
                yield Log(word, first=first)
    yield Log("xsd")
    yield Log("xsdcsd")


def _positions(logs: Iterable[Log], *, is_short: bool) -> Iterator[Reader]:
    """Yield the readers of each history that is shown."""
    yielded = set()
    for log in logs:
        for reader in readers(log.word, is_short=True) if log.word else ():
            if is_short and (reader.is_mixed or reader.ahead):
                continue
            if reader not in yielded:
                yielded.add(reader)
                yield reader


def two_urls(trunk: str, size: int) -> Iterator[State]:
    """Yield states of two urls, each with its own view of a stream."""
    shown = list(views(trunk, size))
    for logs in product(shown, repeat=2):
        if not _is_history(logs[0].word, logs[1].word):
            continue
        pair = (logs[0], replace_url(logs[1], "other"))
        for reader in _positions((*pair, Log(trunk)), is_short=False):
            yield World(pair), reader
            if reader.word is not None and not reader.is_mixed:
                yield World(pair), replace(reader, behind=1)


def damaged_urls(size: int) -> Iterator[State]:
    """Yield states of two urls of one stream, one of which has a fault that never ends; the other may be behind."""
    for word in words(size):
        names = [word[:end] for end in range(1, len(word) + 1)]
        damaged = [Log(word, faults={name: fault}, is_lost=True) for name, fault in product(names, _FAULTS)]
        damaged.append(Log(word, is_up=False, is_lost=True))
        for log, other in product(damaged, {word, word[:-1]}):
            pair = log, Log(other, url="other")
            for reader in _positions(pair, is_short=False):
                yield World(pair), reader
                yield World(pair[::-1]), reader


def three_urls(trunk: str, size: int) -> Iterator[State]:
    """Yield states of three urls, each with its own view of a stream."""
    shown = [log for log in views(trunk, size) if log.first == 0 or log.word.endswith("s")]
    for logs in product(shown, repeat=3):
        if not all(_is_history(one.word, other.word) for one, other in permutations(logs, 2)):
            continue
        triple = tuple(replace_url(log, f"url{number}") for number, log in enumerate(logs))
        for reader in _positions((*triple, Log(trunk)), is_short=True):
            yield World(triple), reader


def promoted_orders(trunk: str) -> Iterator[State]:
    """Yield states of two urls, one of them promoted once or twice, with an order in either stream."""
    tails = ("f", "fs", "fsd", "fss", "fsfs", "fsdfsd", "ff", "ffs")
    for end, tail in product(range(2, len(trunk) + 1), tails):
        word = trunk[:end] + tail
        for order in (*_orders(trunk), *_orders(word)):
            has = order.link is not None and word.startswith(order.link.xxh3)
            orders_at = (order,) if has or order.stream != stream_of(trunk) else ()
            promoted = Log(word, orders=orders_at, url="other")
            former = Log(trunk, orders=(order,) if order.stream == stream_of(trunk) else ())
            for logs in ((former, promoted), (promoted, former), (replace(former, is_up=False), promoted), (promoted,)):
                for reader in _positions((*logs, Log(trunk)), is_short=False):
                    yield World(logs), replace(reader, policy=_PINS)
                    yield World(logs), replace(reader, policy=_PINS, behind=1)


def pinned_twice(trunk: str) -> Iterator[State]:
    """Yield states of a reader at a pin of a stream, which a promoted url continues with an order of its own."""
    for pin, tail in product(_orders(trunk), ("fs", "fsd", "fss", "fsdds")):
        if pin.kind != "pin" or pin.link is None:
            continue
        word, former = trunk + tail, Log(trunk, orders=(pin,))
        for order in _orders(word):
            promoted = Log(word, orders=(pin, replace(order, counter=pin.counter + order.counter)), url="other")
            for logs in ((former, promoted), (promoted, former), (replace(former, is_up=False), promoted), (promoted,)):
                reader = at(pin.link.xxh3, policy=_PINS, known=pin, followed=pin, ended=pin.counter)
                for behind in (0, 1, 2):
                    yield World(logs), replace(reader, behind=behind)


def restored(size: int) -> Iterator[State]:
    """Yield states of a url that lost the newest entries, among them claims, before a publisher continued there."""
    tails = ("r", "rs", "rsd", "rsds", "rsdd", "rss", "rscs", "rsrs", "rrs")
    for trunk in words(size):
        for end, tail in product(range(1, len(trunk)), tails):
            log, stale = Log(trunk[:end] + tail), Log(trunk[:end], url="stale")
            for reader in _positions((Log(trunk), log), is_short=False):
                for merged in _merged(log.word):
                    yield World((replace(log, merged_entries=merged),)), reader
                yield World((log, stale)), reader
                yield World((stale, log)), reader
                yield World((log, Log(trunk, url="other"))), reader
        if "s" in trunk:  # a late copy goes on without the claim
            yield World((Log(trunk + "ds"),)), at(trunk + "c")


def replace_url(log: Log, url: str) -> Log:
    """Return the same log at another url."""
    return replace(log, url=url)


FAMILIES: dict[str, tuple[Callable[[], Iterator[State]], Callable[[], Iterator[State]]]] = {
    "one url": (lambda: one_url(2), lambda: one_url(4)),
    "far behind": (lambda: far_behind(3), lambda: far_behind(6)),
    "gates": (lambda: gates(3), lambda: gates(4)),
    "orders": (lambda: orders(3, is_short=True), lambda: orders(3)),
    "late claims": (lambda: late_claims(5), lambda: late_claims(7)),
    "two urls": (lambda: two_urls("csd", 1), lambda: two_urls("csdd", 2)),
    "damaged urls": (lambda: damaged_urls(2), lambda: damaged_urls(3)),
    "three urls": (lambda: three_urls("csd", 0), lambda: three_urls("csdd", 1)),
    "restored": (lambda: restored(2), lambda: restored(3)),
    "promoted orders": (lambda: promoted_orders("cs"), lambda: promoted_orders("csdds")),
    "pinned twice": (lambda: pinned_twice("csd"), lambda: pinned_twice("csddsd")),
}
"""Name of each family to its short and its whole form."""
