"""Stop flags of background threads, checked while a thread reads from or writes to a store.

The flag is thread-local, so that it need not be passed through every call between a thread's loop and the store. A
thread without a flag is never interrupted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_SLICE_SECONDS = 0.05  # interval at which a thread checks its stop flag while it waits for a response
_CANCEL_SECONDS = 1.0  # maximum wait for the cancellation of a request


class Interrupted(BaseException):
    """Raised when the stop flag of the thread is set.

    Not an :class:`Exception`, so that ``except Exception`` does not catch it.
    """


class _Scope:
    """Stop flag of a thread, and the event loop in which the thread waits for responses."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self.loop = asyncio.SelectorEventLoop()

    def check(self) -> None:
        if self._stop.is_set():
            raise Interrupted

    def checked(self, items: Iterable[T]) -> Iterator[T]:
        for item in items:
            self.check()
            yield item

    def wait(self, request: Callable[[], Awaitable[T]]) -> T:
        self.check()
        return self.loop.run_until_complete(self._result(request))

    def sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Interrupted

    async def _result(self, request: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.ensure_future(request())
        while not (await asyncio.wait({task}, timeout=_SLICE_SECONDS))[0]:
            if self._stop.is_set():
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCEL_SECONDS)
                if task.done() and not task.cancelled():
                    task.exception()  # otherwise asyncio logs that it was never retrieved
                raise Interrupted
        return task.result()


_thread = threading.local()


@contextmanager
def interruptible(stop: threading.Event) -> Iterator[None]:
    """Context manager in which store calls of this thread raise :class:`Interrupted` once ``stop`` is set.

    Uploads of parts and access to local files stop between two pieces. Other requests to a remote store are abandoned
    within about a second.
    """
    scope = _Scope(stop)
    before, _thread.scope = _scope(), scope
    try:
        yield
    finally:
        _thread.scope = before
        scope.loop.close()


def check() -> None:
    """Raise :class:`Interrupted` if the stop flag of this thread is set."""
    scope = _scope()
    if scope is not None:
        scope.check()


def sleep(seconds: float) -> None:
    """Wait, and raise :class:`Interrupted` as soon as the stop flag of this thread is set."""
    scope = _scope()
    if scope is None:
        time.sleep(seconds)
    else:
        scope.sleep(seconds)


def checked(items: Iterable[T]) -> Iterator[T]:
    """Yield ``items`` and check the stop flag before each item.

    The flag is that of the thread that called this function, even if another thread iterates.
    """
    scope = _scope()
    return iter(items) if scope is None else scope.checked(items)


def answer(blocking: Callable[[], T], request: Callable[[], Awaitable[T]]) -> T:
    """Return the response to a request. Raise Interrupted if the stop flag is set before the response arrives.

    A thread without a stop flag calls ``blocking``; others await the same request, which can be cancelled.
    """
    scope = _scope()
    return blocking() if scope is None else scope.wait(request)


def _scope() -> _Scope | None:
    return getattr(_thread, "scope", None)
