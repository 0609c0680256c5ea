"""Stop flags of background threads, checked while a thread reads from or writes to a store.

The flag is thread-local, so that it does not have to be passed down to the store through every call. A thread without a
flag is never interrupted.
"""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_SLICE_SECONDS = 0.05  # interval at which a thread checks its stop flag while it waits for a response
_CANCEL_SECONDS = 1.0  # maximum wait for the cancellation of a request


class Interrupted(BaseException):
    """Raised if the stop flag of the thread is set. ``except Exception`` does not catch it."""


class _Thread(threading.local):
    """Stop flag of a thread, and event loop of its requests. The loop is None outside interruptible()."""

    loop: asyncio.SelectorEventLoop | None = None

    def __init__(self) -> None:
        self.stop = threading.Event()


_thread = _Thread()


@contextmanager
def interruptible(stop: threading.Event) -> Iterator[None]:
    """Context manager in which store calls of this thread raise :class:`Interrupted` once ``stop`` is set.

    Uploads of parts and accesses to local files stop before the next piece. Other requests to a remote store are
    cancelled within about a second.
    """
    before, loop = (_thread.stop, _thread.loop), asyncio.SelectorEventLoop()
    _thread.stop, _thread.loop = stop, loop
    try:
        yield
    finally:
        _thread.stop, _thread.loop = before
        loop.close()


def check() -> None:
    """Raise :class:`Interrupted` if the stop flag of this thread is set."""
    if _thread.stop.is_set():
        raise Interrupted


def sleep(seconds: float) -> None:
    """Sleep for ``seconds``. Raise :class:`Interrupted` as soon as the stop flag of this thread is set."""
    if _thread.loop is None:
        time.sleep(seconds)
    elif _thread.stop.wait(seconds):
        raise Interrupted


def checked(items: Iterable[T]) -> Iterator[T]:
    """Return an iterator over ``items`` that calls :func:`check` before each item."""
    return iter(items) if _thread.loop is None else _checked(items, _thread.stop)


def _checked(items: Iterable[T], stop: threading.Event) -> Iterator[T]:
    for item in items:
        if stop.is_set():
            raise Interrupted
        yield item


def is_interruptible() -> bool:
    """Return True if this thread has a stop flag, so that :func:`send_request` can cancel its requests."""
    return _thread.loop is not None


def send_request(blocking: Callable[[], T], request: Callable[[], Awaitable[T]], seconds: float = math.inf) -> T:
    """Send a request and return the response. Raise Interrupted if the stop flag is set before the response arrives.

    ``blocking`` and ``request`` send the same request. A thread without a stop flag calls ``blocking``. Other threads
    await ``request``, which can be cancelled, and raise TimeoutError if no response arrives within ``seconds``.
    """
    if _thread.loop is None:
        return blocking()
    check()
    return _thread.loop.run_until_complete(_result(request, _thread.stop, time.monotonic() + seconds))


async def _result(request: Callable[[], Awaitable[T]], stop: threading.Event, deadline: float) -> T:
    task = asyncio.ensure_future(request())
    while not (await asyncio.wait({task}, timeout=_SLICE_SECONDS))[0]:
        if stop.is_set() or time.monotonic() > deadline:
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()  # otherwise asyncio logs that it was never retrieved
            if stop.is_set():
                raise Interrupted
            raise TimeoutError("no response in time")
    return task.result()
