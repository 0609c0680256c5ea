"""Recorder of what readers of a log do: their requests to stores, the versions they apply, their errors and status.

It needs only the public names in these tables, so that the code behind them can change.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache, partial, wraps
from pkgutil import resolve_name
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from delta_tracker.errors import StorageError
from tests.stores.wrapped import OPERATIONS

_STORES = ("delta_tracker.stream.storage.storage:Storage", "tests.stores.wrapped:WrappedStorage")
_CLASSES = {  # and the attribute that has the version, or an entry with it
    "delta_tracker.predictor.predictor:Predictor": "version",
    "delta_tracker.recovery.standby:Standby": "version",
    "delta_tracker.stream.mirroring:Mirror": "head",
}
_FUNCTIONS = (
    "delta_tracker.recovery.restore:restore",
    "delta_tracker.stream.maintenance.retention:retain",
    "delta_tracker.stream.pinning:pin_version",
    "delta_tracker.stream.pinning:release_pin",
)
_UNRECORDED = {"reading", "before_fork", "after_fork_in_parent", "after_fork_in_child"}
_STATUS = ("stream", "version", "lag_versions", "rows", "resyncs", "pinned", "admitted", "evicted", "cache")
_ERROR = ("version", "path", "name", "url")
_FOLDER = re.compile(rf"(?:/dev/shm|{re.escape(tempfile.gettempdir())})/(?:pytest-of-[^/]+/pytest-\d+/[^/]+|[^/]+)")
# Ids of 16 or 32 digits, and ports.
_NEW = re.compile(r"(?<![0-9a-zA-Z])(?:[0-9a-f]{32}|[0-9a-f]{16})(?![0-9a-zA-Z])|(?<=127\.0\.0\.1:)\d+")


class Trace:
    """Versions and calls of the readers of one test, by the name of the reader."""

    def __init__(self) -> None:
        self.readers: dict[str, Any] = {}
        self.followers: WeakSet[object] = WeakSet()  # they have a thread, until they are stopped
        self._made: WeakKeyDictionary[object, dict[str, Any]] = WeakKeyDictionary()
        self._counts: Counter[str] = Counter()
        self._names: dict[tuple[str, object], tuple[str, object]] = {}

    def number(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{kind} {self._counts[kind]}"

    def reader(self, kind: str, made: object) -> dict[str, Any]:
        """Return what is kept of a reader; of a new one for the call of a function, where ``made`` is None."""
        found = None if made is None else self._made.get(made)
        if found is None:
            found = self.readers[self.number(kind)] = {"versions": [], "calls": []}
            if made is not None:
                self._made[made] = found
        return found

    def plain(self, text: str) -> str:
        """Return a text with numbers instead of the directories, ids and ports of one run."""
        text = _FOLDER.sub("FOLDER", text)
        found = tuple(_NEW.findall(text))
        return self._name(_NEW.sub("ID", text), found) if found else text

    def _name(self, kind: str, key: object, held: object = None) -> str:
        if (kind, key) not in self._names:
            self._names[kind, key] = self.number(kind), held
        return self._names[kind, key][0]

    def object(self, storage: Any, name: str) -> str:
        """Return the name of an object with its store. Those of writers are numbered too, which come first."""
        url = self.plain(storage.url)
        if url.startswith("memory:"):  # all views of a store share the counts
            url = self._name("memory", id(storage.requests), storage.requests)
        elif not storage.lists and storage.uncached is storage:
            url += " past caches"
        return f"{self.plain(name)} of {url}"

    def error(self, error: BaseException) -> str:
        """Return the type of an error and what it names, but not its words."""
        named = [f"{key}={vars(error)[key]}" for key in _ERROR if vars(error).get(key) is not None]
        return " ".join([type(error).__name__, *map(self.plain, named)])

    def status(self, made: Any) -> dict[str, Any]:
        """Return the fields of a status that do not depend on time. Texts are reduced to errors and versions."""
        texts = {key: getattr(made, key, None) or "" for key in ("error", "last_resync")}
        errors = {key: re.findall(r"^version \S+ to \S+(?=:)|\w+Error\b", text)[:2] for key, text in texts.items()}
        found = {key: getattr(made, key) for key in _STATUS if hasattr(made, key)}
        return found | errors | {"stream": self.plain(str(made.stream))}

    def result(self, made: Any) -> Any:
        """Return a result without what differs in each run."""
        made = getattr(made, "restored", made)
        return made if isinstance(made, int | None) else f"{type(made).__name__} {getattr(made, 'version', '')}"


class Call:
    """Call of a reader, of which the requests in its own thread are kept; of one that follows, only the versions."""

    def __init__(self, trace: Trace, kind: str, attribute: str, made: object, method: str) -> None:
        self.trace, self.made, self._attribute, reader = trace, made, attribute, trace.reader(kind, made)
        self._versions, self._last = reader["versions"], reader["versions"][-1:]
        if method == "stop":
            trace.followers.discard(made)
        is_following = made in trace.followers
        if method == "follow" and hasattr(made, "stop"):
            trace.followers.add(made)
        self._has_status = not is_following and method != "follow"
        self._thread = threading.get_ident() if self._has_status and method != "stop" else None
        self.kept: dict[str, Any] = {"call": method, "events": []}
        if not is_following:
            reader["calls"].append(self.kept)

    def look(self, *request: str) -> None:
        """Keep the version if it has changed, and a request."""
        kept = self.kept["events"] if threading.get_ident() == self._thread else []
        with suppress(AttributeError):  # it is being built, or a function
            found = getattr(self.made, self._attribute)
            version = getattr(found, "version", found)
            if self._versions[-1:] != [version] != [None]:
                self._versions.append(version)
            if threading.get_ident() == self._thread and self._last != [version] != [None]:
                self._last = [version]
                kept.append(f"version {version}")
        kept.extend(request)

    def end(self, answer: Any) -> None:
        """Keep the status. It is asked for without a request, so that nothing changes."""
        self.look()
        if not self._has_status:
            return
        if hasattr(answer, "lag_versions"):
            self.kept["status"] = self.trace.status(answer)
        elif hasattr(self.made, "status"):
            with _set(_is_asked, True), suppress(AttributeError):  # it was not built
                self.kept["status"] = self.trace.status(self.made.status()) | {"lag_versions": None}
        elif isinstance(error := getattr(self.made, "error", None), BaseException):
            self.kept["status"] = {"error": self.trace.error(error)}


TRACES: list[Trace] = []  # the last one is recorded
_call: ContextVar[Call | None] = ContextVar("call", default=None)
_is_inside = ContextVar("is_inside", default=False)  # an operation of a store
_is_asked = ContextVar("is_asked", default=False)  # for a status: requests are refused


@contextmanager
def recording() -> Iterator[Trace]:
    """Context manager that yields the trace of its body."""
    TRACES.append(Trace())
    random.seed(0)
    try:
        yield TRACES[-1]
    finally:
        TRACES.pop()


@contextmanager
def _set(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _operation(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def operation(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if _is_asked.get():
            raise StorageError(self.url, "the recorder asks for a status")
        if not TRACES or _is_inside.get():  # for example of a wrapper, or of a rule of a test
            return original(self, name, *args, **kwargs)
        call, request = _call.get(), f"{original.__name__} {TRACES[-1].object(self, name)}"
        if call is not None:
            call.look(request)
        with _set(_is_inside, True):
            return original(self, name, *args, **kwargs)

    return operation


def _recorded(original: Callable[..., Any], kind: str, attribute: str) -> Callable[..., Any]:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        made, outer, answer = args[0] if attribute else None, _call.get(), None
        if not TRACES or _is_asked.get() or (outer is not None and outer.made is made):
            return original(*args, **kwargs)
        call = Call(TRACES[-1], kind, attribute, made, original.__name__)
        with _set(_call, call), _set(_is_inside, False):
            try:
                answer = original(*args, **kwargs)
                call.kept["result"] = None if hasattr(answer, "lag_versions") else call.trace.result(answer)
            except BaseException as error:
                call.kept["raises"] = call.trace.error(error)
                raise
            finally:
                call.end(answer)
        return answer

    return function


def _start(original: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
    """Start a thread. If a call starts it, it belongs to the call."""
    if _call.get() is not None and not _is_inside.get():
        thread.run = partial(copy_context().run, thread.run)  # type: ignore[method-assign]
    original(thread)


@cache
def install() -> None:
    """Observe stores and readers in this process, from now on."""
    for store in map(resolve_name, _STORES):
        for kind in OPERATIONS & vars(store).keys():
            setattr(store, kind, _operation(vars(store)[kind]))
    for path, attribute in _CLASSES.items():
        reader = resolve_name(path)
        for name, value in list(vars(reader).items()):
            if isinstance(value, FunctionType) and (name == "__init__" or name[0] != "_") and name not in _UNRECORDED:
                setattr(reader, name, _recorded(value, reader.__name__, attribute))
    for function in map(resolve_name, _FUNCTIONS):
        observed = _recorded(function, function.__name__, "")
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(function.__name__) is function:
                setattr(module, function.__name__, observed)
    start = threading.Thread.start
    threading.Thread.start = lambda thread: _start(start, thread)  # type: ignore[method-assign]


def on_rank(rank: int, world_size: int, *, traced: str, **arguments: Any) -> dict[str, Any]:
    """Run a case of :class:`tests.ranks.RankPool`, and return its result with what is kept of its readers."""
    install()
    with recording() as trace:
        result = resolve_name(traced)(rank, world_size, **arguments)
    return {"result": result, "readers": {f"rank {rank} {name}": kept for name, kept in trace.readers.items()}}
