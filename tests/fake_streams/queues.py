"""Queues of operations, one for each stream, and the order in which the operations run."""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tests.fake_streams.order import Order, Use


class Operation:
    """Operation in the queue of a stream.

    Args:
        queue: queue of the stream.
        number: number of the operation; later ones have higher numbers.
        run: function that does the work; None for a wait.
        after: operations of other streams that must have run before.
    """

    __slots__ = ("after", "is_done", "number", "queue", "run")

    def __init__(
        self, queue: Queue, number: int, run: Callable[[], None] | None, after: Iterable[Operation] = ()
    ) -> None:
        self.queue = queue
        self.number = number
        self.run = run
        self.after = [each for each in after if not each.is_done]
        self.is_done = False

    @property
    def is_ready(self) -> bool:
        """True if all operations of other queues that this operation waits for have run."""
        return all(each.is_done for each in self.after)


class Queue:
    """Operations of one stream that have not run.

    Args:
        number: number of the stream.
        weight: relative probability with which the scheduler chooses this queue.
    """

    def __init__(self, number: int, weight: float) -> None:
        self.number = number
        self.weight = weight
        self.pending: deque[Operation] = deque()
        self.last: Operation | None = None  # newest operation, which may have run


class Scheduler:
    """Chooses the order of operations. An order is legal if each queue is in order and each wait is respected.

    The seed chooses one of several kinds of order: operations run at once, as late as possible, or in between; the
    streams are equally fast, or some are much slower than others.

    Args:
        seed: seed of all choices.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.order = Order()
        self._fault: BaseException | None = None  # error of an operation; like CUDA's, it is raised by each later wait
        self._is_running = False
        self._numbers = itertools.count()
        self._queues: list[Queue] = []
        self._shared: Queue | None = None  # for memory that several streams used, which is freed later
        self._eagerness = self.random.choice([0.0, 0.0, 0.2, 0.5, 0.9])
        self._spread = self.random.choice([0, 0, 1, 3])

    def queue(self) -> Queue:
        """Return the queue of a new stream."""
        with self.lock:
            queue = Queue(len(self._queues), 10 ** self.random.uniform(-self._spread, 0))
            self._queues.append(queue)
            return queue

    def append(
        self,
        queue: Queue,
        run: Callable[[], None] | None,
        after: Sequence[Operation] = (),
        use: Use | None = None,
    ) -> Operation:
        """Append an operation to a queue, then run a random number of operations."""
        with self.lock:
            operation = Operation(queue, next(self._numbers), run, after)
            self.order.launched(queue.number, operation.number, [each.number for each in after], use)
            return self._append(operation)

    def free(self, queue: Queue, storage: Any, spoil: Callable[[], None], others: Iterable[Queue]) -> None:
        """Free memory of a stream that other streams have used, too."""
        with self.lock:
            after = [each.last for each in others if each.last is not None]
            self.order.freed(storage, [queue.number, *(each.queue.number for each in after)])
            if after:  # later operations of the stream do not wait for the others: they use other memory
                after += [] if queue.last is None else [queue.last]
                self._shared = queue = self._shared or self.queue()
            operation = Operation(queue, next(self._numbers), spoil, after)
            self.order.launched(queue.number, operation.number, (), None)
            self._append(operation)

    def wait(self, operation: Operation | None) -> None:
        """Run an operation, all operations that it needs, and a random number of others."""
        with self.lock:
            if operation is not None and not operation.is_done:
                needed = self._needed(operation)
                while not operation.is_done:
                    is_eager = self.random.random() < self._eagerness
                    first = [
                        queue for queue, last in needed.items() if queue.pending and queue.pending[0].number <= last
                    ]
                    assert self._run_one(self._queues if is_eager else first), "an operation waits for itself"
            if operation is not None:
                self.order.host_waited(operation.number)
            self._raise_fault()

    def is_done(self, operation: Operation | None) -> bool:
        """Return True if an operation has run, or if there is none. The host then knows."""
        with self.lock:
            if operation is not None and operation.is_done:
                self.order.host_waited(operation.number)
            return operation is None or operation.is_done

    def drain(self) -> None:
        """Run all operations."""
        with self.lock:
            while self._run_one(self._queues):
                pass
            self._raise_fault()

    def _append(self, operation: Operation) -> Operation:
        operation.queue.pending.append(operation)
        operation.queue.last = operation
        while self.random.random() < self._eagerness and self._run_one(self._queues):
            pass
        return operation

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _needed(self, operation: Operation) -> dict[Queue, int]:
        """Return the queues with operations that must run before ``operation``, and the number of the last of them."""
        found: dict[Queue, int] = {}
        waiting = [operation]
        while waiting:
            last = waiting.pop()
            before = found.get(last.queue, -1)
            if last.number > before:
                found[last.queue] = last.number
                for each in last.queue.pending:
                    if before < each.number <= last.number:
                        waiting += [other for other in each.after if not other.is_done]
        return found

    def _run_one(self, queues: list[Queue]) -> bool:
        """Run the first operation of one of the queues. Return False if none is ready."""
        ready = [queue for queue in queues if queue.pending and queue.pending[0].is_ready]
        if not ready or self._is_running:  # an operation that frees memory appends another one
            return False
        queue = self.random.choices(ready, [each.weight for each in ready])[0]
        operation = queue.pending.popleft()
        self._is_running = True
        try:
            if operation.run is not None:
                with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                    operation.run()
        except Exception as error:  # noqa: BLE001  whatever the operation raises
            self._fault = self._fault or error
        finally:
            self._is_running = False
            operation.is_done = True
            operation.run, operation.after = None, []
        return True
