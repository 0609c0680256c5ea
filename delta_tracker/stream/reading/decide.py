"""Rules that decide what a reader applies next. :func:`next_reader_action` is a pure function of a :class:`View`.

A reader only moves forward: to a newer version of its stream, or to a stream that continues its stream. Exceptions are
orders, tables with mixed rows, and a log that was replaced by an unrelated log.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from typing import ClassVar

from delta_tracker.errors import (
    CorruptPartError,
    HeldVersionError,
    LeftOutPartError,
    MalformedError,
    MissingTableError,
    MissingVersionError,
    ModelMismatchError,
    NoSnapshotError,
    OlderCopyError,
    PartialRowsError,
    StaleCacheError,
    StorageError,
    StreamError,
    StreamReplacedError,
)
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.reading.orders import Order, OrderPolicy
from delta_tracker.stream.reading.path import (
    Allows,
    check_is_newer,
    committed_entry,
    continues,
    has_other_entry,
    is_forward,
    merged_deltas,
    next_entry,
    path_to,
    path_to_entry,
    readable,
    snapshots,
)
from delta_tracker.stream.reading.position import Position, Rows
from delta_tracker.stream.reading.seen import SeenLog

CACHE_FAULTS = (CorruptPartError, MalformedError, MissingVersionError, StreamReplacedError)
"""Faults that a cache can cause: it may return an old 404, a damaged object, or an object of a replaced stream."""

_MISFITS = (MissingTableError, ModelMismatchError)
OF_ALL_URLS = (HeldVersionError, PartialRowsError, *_MISFITS)
"""Faults of an entry that does not fit the reader. They do not depend on the url from which the entry is read."""

FAULTS = (*CACHE_FAULTS, *OF_ALL_URLS, LeftOutPartError)
"""Errors of a version after which a merged version or a newer snapshot may still be applied."""

NUM_TRIES = 3
"""Number of consecutive storage errors after which an unreadable object counts as lost. Missing permissions or a bad
sector, for example, can make it unreadable permanently."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Error of an entry that was read from the url with index ``number`` and could not be applied in this round."""

    number: int
    entry: Manifest
    error: StreamError

    def concerns(self, number: int, entry: Manifest) -> bool:
        """Return True if ``entry`` has this fault at the url with index ``number``; see :data:`OF_ALL_URLS`."""
        if number != self.number and not isinstance(self.error, OF_ALL_URLS):
            return False
        own = self.entry
        return (entry.stream, entry.link, entry.merges) == (own.stream, own.link, own.merges)


@dataclass(frozen=True, slots=True)
class View:
    """Input of :func:`next_reader_action`.

    Args:
        logs: logs at the urls of the reader. The first is the log at the current url.
        faults: faults of entries that could not be applied in this round.
        num_failures: number of rounds that have failed since the last success.
        looks_for_gap: True to check whether a missing next entry was deleted.
        catches_up: True to look for an entry that replaces many versions.
        surveys: True to check the other urls even if the log at the current url has no newer version.
        is_partial: True if this round skips some urls because earlier reads from them failed.
        followed: last pin or release that was carried out.
    """

    logs: tuple[SeenLog, ...]
    position: Position | None = None
    policy: OrderPolicy = field(default_factory=OrderPolicy)
    faults: tuple[Fault, ...] = ()
    num_failures: int = 0
    looks_for_gap: bool = True
    catches_up: bool = False
    surveys: bool = False
    is_partial: bool = False
    followed: Order | None = None

    @property
    def is_patient(self) -> bool:
        """True if an unreadable object is retried after the next storage error, instead of counting as lost."""
        return self.num_failures < NUM_TRIES - 1

    def fault_of(self, log: SeenLog, entry: Manifest) -> StreamError | None:
        """Return the fault in :attr:`faults` that ``entry`` has in ``log``; None if there is none."""
        for each in self.faults:
            if each.concerns(log.number, entry):
                return each.error
        return None


class Rule(Enum):
    """Rule that led to a decision. Its value states when the rule applies; see ``guide/fleet.md`` for the effects."""

    NEXT = "the next version is committed"
    CATCH_UP = "a start, or 8 versions applied in a row, did not reach the newest"
    START = "the tables have no rows of the stream yet, or mixed ones"
    RESYNC = "the next version cannot be applied"
    PIN = "a pin or a rollback applies"
    RELEASE = "a pin was released"
    SUCCESSION = "the pinned stream ended, and the next one has a snapshot"
    NEWEST = "no newer version is committed"
    CANARY = "the canary does not allow the next version, or that of a pin or release, yet"
    PINNED = "the tables have the version of a pin or a rollback"
    ENDED = "the pinned stream ended, and the next one has no snapshot yet"
    CACHE = "a fault may be that of an HTTP cache"
    FAULT = "nothing can be applied"


@dataclass(frozen=True, slots=True)
class Apply:
    """Decision to apply entries, in order.

    Args:
        log: log from which to read the entries.
        entries: the entries. If there are several, all are checked before the first row is written.
        cause: fault that requires a resync; None without a resync.
        is_elsewhere: True if the entries may belong to a different history from the applied version, so that the tables
            contain rows of unrelated versions while the entries are written. False if ``order`` is given.
        order: pin or rollback that the entries carry out; None otherwise. With an order, the entries bypass the gate.
    """

    log: SeenLog
    entries: tuple[Manifest, ...]
    rule: Rule
    cause: StreamError | None = None
    is_elsewhere: bool = False
    order: Order | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """Decision to apply nothing now. ``pinned`` is the version at which an order keeps the reader, or None."""

    log: SeenLog
    rule: Rule
    why: str
    pinned: int | None = None


@dataclass(frozen=True, slots=True)
class Reread:
    """Decision to reread the objects that may have caused ``error``, bypassing the caches."""

    rule: ClassVar[Rule] = Rule.CACHE
    log: SeenLog
    error: StreamError


@dataclass(frozen=True, slots=True)
class Fail:
    """Decision to report an error and to try again in the next round."""

    rule: ClassVar[Rule] = Rule.FAULT
    error: StreamError

    @property
    def ends_survey(self) -> bool:
        """True if the other urls need not be checked again: the fault exists at every url, or a cache may be stale."""
        return isinstance(self.error, (StaleCacheError, *OF_ALL_URLS))


Decision = Apply | Stay | Reread | Fail


def next_reader_action(view: View) -> Decision:
    """Return the next action of a reader.

    The decision is based on ``view.logs[0]``. If that log cannot be used, or if ``view.surveys`` is True and it has no
    newer version, the other logs are tried in order.
    """
    try:
        decision: Decision = _decide_for_log(view.logs[0], view)
    except StreamError as error:
        decision = Fail(error)
    if len(view.logs) == 1 or not _asks_others(decision, view):
        return decision
    return _decide_for_other_logs(view, decision)


def _decide_for_other_logs(view: View, decision: Decision) -> Decision:
    """Return the decision for another log, or ``decision`` if no other log is better than the current one."""
    lead, *others = view.logs
    # Another log at rest is better then. If it lacks a version too, the fault of that one must be seen.
    error = decision.error if isinstance(decision, Fail) else None
    is_unusable = isinstance(error, StorageError | OlderCopyError | LeftOutPartError)
    reread: Reread | None = None
    other_view = replace(view, looks_for_gap=True, surveys=False)
    for other in others:
        try:
            found = _decide_for_log(replace(other, may_be_stale=False), other_view)
        except CACHE_FAULTS as fault:
            damaged = next((each.error for each in view.faults if each.number == other.number), None)
            if reread is None and other.may_be_stale and (damaged or error):
                reread = Reread(other, damaged or fault)
            continue
        except StreamError:
            continue
        is_better = is_unusable or (other.number < lead.number and not isinstance(error, OF_ALL_URLS))
        is_forward = isinstance(found, Apply) and not _hides_misfit(other, view, found)
        if is_forward or (isinstance(found, Stay) and is_better):
            return found
    # The copies of another log in a cache may be all that is in the way.
    return decision if reread is None or isinstance(error, OF_ALL_URLS) else reread


def _hides_misfit(log: SeenLog, view: View, found: Apply) -> bool:
    """Return True if the first version of ``found`` may be older than a version that does not fit the model."""
    begun, misfits = found.entries[-1], [each.entry for each in view.faults if isinstance(each.error, _MISFITS)]
    return view.position is None and not all(
        begun.version > each.version if each.stream == begun.stream else each.stream in log.former_streams()
        for each in misfits
    )


def _asks_others(decision: Decision, view: View) -> bool:
    """Return True if the other logs must be checked after ``decision`` for the current log."""
    if not isinstance(decision, Fail):
        return isinstance(decision, Stay) and view.surveys
    error = decision.error
    # Another log may have a newer snapshot, for example after a promotion, or be left if this one was deleted.
    if isinstance(error, (StaleCacheError, *OF_ALL_URLS)):
        return view.surveys
    if isinstance(error, StorageError):  # it may be over soon
        return view.num_failures >= NUM_TRIES - 2
    return isinstance(error, (NoSnapshotError, OlderCopyError, LeftOutPartError, *CACHE_FAULTS))


def _decide_for_log(log: SeenLog, view: View) -> Apply | Stay | Reread:
    order, position = _order(log, view), view.position
    try:
        if position is None or position.rows is Rows.MIXED:
            return _start_with_order(log, view, order)
        if order is None:
            return _apply_next(log, view, position)
        if order.stream == position.stream:
            return _follow_order(log, view, position, order)
        return _follow_other_stream(log, view, position, order)
    except CACHE_FAULTS as fault:
        if log.may_be_stale:
            return Reread(log, fault)
        raise


def _follow_other_stream(log: SeenLog, view: View, position: Position, order: Order) -> Apply | Stay:
    """Follow an order of another stream than the position's, if that stream continues the position's stream.

    Otherwise, follow the position's stream until it ends or has a fault, as far as the stream's own order allows. A
    reader at a pin stays there until it can move to the other stream, because the versions after the pin may be bad.
    """
    pin = _pin_of(view, position)
    joined = None
    if order.is_new or pin is not None:
        joined = _move_to_order(log, view, position, StreamReplacedError(log.url, position.version))
    if isinstance(joined, Apply):
        return joined
    if pin is not None:
        return joined or _follow_order(log, view, position, pin)
    own = log.order()
    if own is not None and own.stream == position.stream and not view.policy.has_released(own):
        return _follow_order(log, view, position, own)
    return _apply_next(log, view, position)


# Orders


def _pin_of(view: View, position: Position) -> Order | None:
    """Return the pin that keeps the reader at ``position``; None if there is none, or if this process released it."""
    pin, policy = view.followed, view.policy
    if pin is None or pin.kind != "pin" or policy.own is not None or policy.has_released(pin):
        return None
    return pin if pin.is_followed_by(position) else None


def _order(log: SeenLog, view: View) -> Order | None:
    """Return the order that applies: the newest pin or release, or a later rollback of this process."""
    own = view.policy.own
    if not view.policy.follows_pins:
        return own
    newest = log.order()
    for other in view.logs if view.surveys else ():
        with suppress(StreamError):
            found = other.order()
            if found is not None and (newest is None or _is_newer(log, found, newest)):
                newest = found
    if own is not None and (newest is None or not _ends(log, newest, own)):
        return own
    return None if newest is None or view.policy.has_released(newest) else newest


def _ends(log: SeenLog, order: Order, own: Order) -> bool:
    """Return True if ``order`` ends the rollback ``own``, because it is newer or belongs to a later stream."""
    if order.stream == own.stream:
        return order.counter > own.counter
    with suppress(MalformedError, StorageError):
        return own.stream in log.former_streams() and order.stream not in log.former_streams()
    return False


def _is_newer(log: SeenLog, order: Order, former: Order) -> bool:
    """Return True if ``order`` is newer than ``former``: its stream continues the other's, or its counter is higher."""
    if order.stream != former.stream:
        streams = log.former_streams()
        if (order.stream in streams) != (former.stream in streams):
            return former.stream in streams
    return former.counter < order.counter


def _follow_order(log: SeenLog, view: View, position: Position, order: Order) -> Apply | Stay:
    """Follow an order of the position's stream until another stream continues that stream."""
    is_there = order.is_followed_by(position)
    if is_there and order.kind == "release":
        return _apply_next(log, view, position)
    stay = Stay(log, Rule.PINNED, f"pinned to version {order.version}", position.version)
    if order.kind == "rollback":
        return stay if is_there else _apply_rollback(log, view, order)
    if is_there and not view.looks_for_gap:
        return stay
    if _has_ended(log, order):
        return _leave_ended_stream(log, view, position, order)
    return stay if is_there else _apply_order(log, view, order)


def _not_yet(log: SeenLog, order: Order) -> Stay:
    return Stay(log, Rule.CANARY, f"the canary does not allow version {order.version} of the {order.kind} yet")


def _apply_order(log: SeenLog, view: View, order: Order) -> Apply | Stay:
    """Apply the entries that lead to a pin, or the newest snapshot at or after a release, if a canary allows it."""
    if order.kind == "pin":
        return _apply_pin(log, view, order)
    return _apply_first(log, view, _released_snapshots(log, view, order), Rule.RELEASE) or _not_yet(log, order)


def _apply_rollback(log: SeenLog, view: View, order: Order) -> Apply:
    """Apply the version of a rollback that this process requested, starting with a snapshot."""
    head = log.head()
    if head is None or head.stream != order.stream or head.version < order.version:
        raise _missing(order)
    return _apply_path(log, view, order, path_to(log, order.version, position=view.position), None)


def _apply_pin(log: SeenLog, view: View, order: Order) -> Apply | Stay:
    """Apply exactly the version of a pin: forward by deltas, back by a snapshot, once the canary allows it."""
    position, target = view.position, _named(log, order)
    if view.policy.is_canary and not log.allows(target):
        return _follow_until_pin(log, view, order)
    start = position if position is not None and position.rows is Rows.WHOLE else None
    return _apply_path(log, view, order, path_to_entry(log, target, order.newest, position=start), start)


def _apply_path(log: SeenLog, view: View, order: Order, path: Sequence[Manifest], start: Position | None) -> Apply:
    """Apply ``path``. If one of its entries has a fault, apply another path to the same last entry."""
    if (fault := _first_fault(log, view, path)) is not None:
        may_pass = view.is_patient and isinstance(fault, StorageError)
        if may_pass or (log.may_be_stale and isinstance(fault, CACHE_FAULTS)):
            raise fault
        others = log.without(each.entry for each in view.faults if each.concerns(log.number, each.entry))
        with suppress(MalformedError, MissingVersionError, NoSnapshotError):
            last = committed_entry(others, path[-1].version, path[-1], link=path[-1].link)
            path = path_to_entry(others, last, order.newest, position=start)
        if _first_fault(log, view, path) is not None:
            raise fault
    return Apply(log, tuple(path), Rule.PIN, order=order)


def _first_fault(log: SeenLog, view: View, entries: Iterable[Manifest]) -> StreamError | None:
    return next((fault for each in entries if (fault := view.fault_of(log, each)) is not None), None)


def _named(log: SeenLog, order: Order) -> Manifest:
    """Return the entry that a pin or a release names. Raise MissingVersionError if it is missing in the log."""
    entry = log.named(order)
    if entry is None:
        raise _missing(order)
    return entry


def _missing(order: Order) -> MissingVersionError:
    remedy = "Pass another version (delta-tracker rollback --replace), or call delta-tracker release"
    return MissingVersionError(order.version, order.newest).with_remedy(remedy)


def _follow_until_pin(log: SeenLog, view: View, order: Order) -> Apply | Stay:
    """Follow the stream, but not beyond the pin ``order``, which the canary does not allow yet."""
    position, stay = view.position, _not_yet(log, order)
    if position is None or position.rows is Rows.MIXED:
        with suppress(NoSnapshotError):
            return _start_at_snapshot(log, view, order.version)
        return stay
    if position.stream != order.stream:
        found = takewhile(lambda each: each.stream == order.stream, _snapshots(log, view, order.version))
        return _apply_first(log, view, found, Rule.RESYNC) or stay
    if position.version >= order.version:
        return stay
    return _apply_next(log, view, position, order.version)


def _released_snapshots(log: SeenLog, view: View, order: Order) -> Iterator[Manifest]:
    later = False
    for snapshot in _snapshots(log, view):
        if snapshot.stream != order.stream or snapshot.link.version <= order.version:
            break
        later = True
        yield snapshot
    try:
        entry = _named(log, order)
    except MissingVersionError:
        if later:  # retention may have deleted the one that the release names
            return
        raise
    if not view.policy.is_canary or log.allows(entry):
        yield entry


def _has_ended(log: SeenLog, order: Order) -> bool:
    """Return True if the newest entry of the log does not belong to the stream of ``order``."""
    try:
        head = log.head()
    except MalformedError:  # perhaps why the stream was pinned
        return False
    return head is not None and head.stream != order.stream


def _leave_ended_stream(log: SeenLog, view: View, position: Position, order: Order) -> Apply | Stay:
    """Move from a stream that ended under a pin or a release to a snapshot of a stream that continues it."""
    _check_may_follow(log, view, position)
    found = takewhile(lambda each: each.stream != order.stream, _snapshots(log, view))
    decision = _apply_first(log, view, found, Rule.SUCCESSION)
    text = f"the stream of the pinned version {order.version} ended, and the next one has no snapshot yet"
    return Stay(log, Rule.ENDED, text, position.version) if decision is None else decision


# Without usable rows


def _start_with_order(log: SeenLog, view: View, order: Order | None) -> Apply | Stay:
    """Begin with the version of ``order``, or with the newest snapshot if there is no order for the newest stream."""
    if order is None:
        return _start_at_snapshot(log, view)
    if order.kind == "rollback":
        return _apply_rollback(log, view, order)
    head = log.head()
    if head is None or head.stream != order.stream:
        return _start_at_snapshot(log, view)
    if view.position is not None and view.position.stream != order.stream:
        _check_may_follow(log, view, view.position)
    found = _apply_order(log, view, order)
    if isinstance(found, Stay) and view.position is None:
        raise NoSnapshotError(log.url)
    return found


def _start_at_snapshot(log: SeenLog, view: View, bound: int | None = None) -> Apply:
    allows = _allows(log, view, bound)
    try:
        return _apply_newest(log, view, snapshots(log, allows=allows), None)
    except StorageError as error:
        if view.is_patient:
            raise
        return _apply_newest(log, view, snapshots(log, allows=allows, skips_unreadable=True), error)


def _apply_newest(log: SeenLog, view: View, found: Iterable[Manifest], cause: StreamError | None) -> Apply:
    num_unreadable = 0
    for snapshot in found:
        if view.position is not None and view.position.stream != snapshot.stream:
            _check_may_follow(log, view, view.position)
        fault = view.fault_of(log, snapshot)
        if fault is None:
            rule = Rule.START if cause is None else Rule.RESYNC
            return Apply(log, (snapshot,), rule, cause, is_elsewhere=cause is not None)
        if isinstance(fault, (*_MISFITS, LeftOutPartError)):
            raise fault  # with an older one, the mismatch would remain unnoticed
        if isinstance(fault, StorageError) and view.is_patient:
            raise fault
        cause = cause or fault
        num_unreadable += isinstance(fault, StorageError)
        if num_unreadable == NUM_TRIES:  # an outage, not a single object
            break
    raise cause or NoSnapshotError(log.url)


# Forward


def _apply_next(log: SeenLog, view: View, position: Position, bound: int | None = None) -> Apply | Stay:
    """Apply the next version, up to ``bound``, or an entry that replaces many versions. Skip versions with faults."""
    ahead = log.ahead(position) if view.catches_up and bound is None else None
    if ahead is not None and _skips_to(log, view, position, ahead) and view.fault_of(log, ahead) is None:
        return Apply(log, (ahead,), Rule.CATCH_UP, is_elsewhere=_is_unproven(log, view, ahead))
    try:
        entry = next_entry(log, position, log.next(position, looks_for_gap=view.looks_for_gap))
    except (*FAULTS, StorageError) as error:
        return _apply_instead(log, view, position, error, bound)
    if entry is None:
        return Stay(log, Rule.NEWEST, f"version {position.version} is the newest")
    allows = _allows(log, view, bound)
    if allows is not None and not allows(entry):
        return Stay(log, Rule.CANARY, f"version {entry.version} is not allowed yet")
    fault = view.fault_of(log, entry)
    return Apply(log, (entry,), Rule.NEXT) if fault is None else _apply_instead(log, view, position, fault, bound)


def _skips_to(log: SeenLog, view: View, position: Position, ahead: Manifest) -> bool:
    """Return True if ``ahead``, which replaces many versions, continues the history of ``position``."""
    if ahead.kind == "snapshot":
        return _is_forward(log, view, position, ahead)
    return continues(log, position, ahead)


def _apply_instead(log: SeenLog, view: View, position: Position, fault: StreamError, bound: int | None) -> Apply | Stay:
    """Apply a merged delta or a newer snapshot, because the next version cannot be applied."""
    is_unreadable = isinstance(fault, StorageError) and (view.is_patient or isinstance(fault, StaleCacheError))
    if is_unreadable or (log.may_be_stale and isinstance(fault, CACHE_FAULTS)):
        raise fault
    if (joined := _move_to_order(log, view, position, fault)) is not None:
        return joined
    if not isinstance(fault, StreamReplacedError):
        merged = merged_deltas(log, position, allows=_allows(log, view, bound), skips_unreadable=not view.is_patient)
        merged = (entry for entry in merged if continues(log, position, entry))
        if (found := _apply_first(log, view, merged, Rule.RESYNC, fault)) is not None:
            return found
    allowed = _snapshots(log, view, bound)
    newer: Iterator[Manifest] = takewhile(lambda each: _is_forward(log, view, position, each), allowed)
    if (found := _apply_first(log, view, newer, Rule.RESYNC, fault)) is not None:
        return found
    if isinstance(fault, StreamReplacedError):
        check_is_newer(log, position)
    raise fault


def _move_to_order(log: SeenLog, view: View, position: Position, cause: StreamError) -> Apply | Stay | None:
    """Return the decision for an order of a stream that continues the position's stream; None without such an order."""
    order = _order(log, view)
    if order is None or order.stream == position.stream:
        return None
    try:
        head = log.head()
    except (MalformedError, StorageError) as error:
        if isinstance(error, StorageError) and view.is_patient:
            raise
        return None  # an order of a former stream must not prevent the recovery from a fault for ever
    if head is None or head.stream != order.stream:
        return None
    _check_may_follow(log, view, position)
    found = _apply_order(log, view, order)
    return replace(found, cause=cause) if isinstance(found, Apply) else found


def _is_forward(log: SeenLog, view: View, position: Position, snapshot: Manifest) -> bool:
    """Return True if ``snapshot`` is newer than ``position``, or its stream continues that of ``position``."""
    if snapshot.stream != position.stream:
        _check_may_follow(log, view, position)
        return True
    if not is_forward(log, position, snapshot):
        return False
    if not _has_others(view):
        return True
    is_other = snapshot.version <= position.version or has_other_entry(log, position)
    return not is_other or _all_others(log, view, lambda other: not position.names(other.read(position.version)))


def _has_others(view: View) -> bool:
    return len(view.logs) > 1 or view.is_partial


def _all_others(log: SeenLog, view: View, lacks: Callable[[SeenLog], bool]) -> bool:
    """Return True if the logs at all other urls can be read, and ``lacks`` returns True for each of them."""
    with suppress(MalformedError, StorageError):
        return not view.is_partial and all(lacks(other) for other in view.logs if other.number != log.number)
    return False


def _check_may_follow(log: SeenLog, view: View, position: Position) -> None:
    """Raise StreamReplacedError unless a reader may change from its stream to the newest stream of ``log``.

    A reader may change if the newest stream continues its stream. It may also change if all logs can be read, none
    contains its stream, and the newest entry is newer than the position: a missing directory may contain the stream.
    """

    def lacks(other: SeenLog) -> bool:
        head = other.head()
        return head is None or position.stream not in (head.stream, *other.former_streams())

    if position.stream in log.former_streams():
        return
    newest = log.head()
    if (newest is not None and newest.created <= position.created) or not _all_others(log, view, lacks):
        raise StreamReplacedError(log.url, position.version)


# Common parts


def _snapshots(log: SeenLog, view: View, bound: int | None = None) -> Iterator[Manifest]:
    return snapshots(log, allows=_allows(log, view, bound), skips_unreadable=not view.is_patient)


def _allows(log: SeenLog, view: View, bound: int | None = None) -> Allows | None:
    """Return a function that rejects entries above ``bound`` or not allowed by the canary; None to allow all."""
    if not view.policy.is_canary and bound is None:
        return None

    def allows(entry: Manifest) -> bool:
        return (bound is None or entry.version <= bound) and (not view.policy.is_canary or log.allows(entry))

    return allows


def _is_unproven(log: SeenLog, view: View, entry: Manifest) -> bool:
    """Return True if ``entry`` may belong to another history than the position, whose entry is not in ``log``."""
    position = view.position
    if position is None or position.stream != entry.stream:
        return True
    return entry.kind == "snapshot" and _has_others(view) and not position.names(readable(log.read, position.version))


def _apply_first(
    log: SeenLog, view: View, entries: Iterable[Manifest], rule: Rule, cause: StreamError | None = None
) -> Apply | None:
    """Apply the first entry without a fault. If all have faults, raise the first fault unless ``cause`` is given."""
    first: StreamError | None = None
    num_unreadable = 0
    for entry in entries:
        fault = view.fault_of(log, entry)
        if fault is None:
            is_elsewhere = isinstance(cause, StreamReplacedError) or cause is None or _is_unproven(log, view, entry)
            return Apply(log, (entry,), rule, cause, is_elsewhere=is_elsewhere)
        first = first or fault
        if isinstance(fault, StorageError):
            num_unreadable += 1
            if view.is_patient:
                raise fault
            if num_unreadable == NUM_TRIES:  # an outage, not a single object
                raise cause or fault
    if first is not None and cause is None:
        raise first
    return None
