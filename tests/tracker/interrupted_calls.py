"""Public calls of a tracker with one exception at one line of the library, and what must hold afterwards.

``python -m tests.tracker.interrupted_calls [CALL ...]`` raises KeyboardInterrupt, MemoryError and RuntimeError once at
each line of the library that each call runs, and prints the points at which a promise breaks. Each case builds a small
world, makes the call, and continues: it trains, reads and makes every other call. Promises that are checked:

- After each committed read, the copy of a consumer equals the weights bit for bit.
- A known old state is a state that the consumer had after a committed read.
- Nothing raises afterwards, and no lock is held.
- One read after the call, deltas have the trained rows and no others.
- MemoryError and RuntimeError do not reach a training step.
- A read that fails leaves an earlier uncommitted read valid. An interrupted read may abort it.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import delta_tracker
from delta_tracker import TrackingMode
from delta_tracker.compat import ModelDeltaTrackerTrec
from delta_tracker.errors import DeltaTrackerError, DetachedError, StaleDeltaError
from delta_tracker.types import Delta
from tests.sharding.hook_faults import HANDLERS

EXCEPTIONS: tuple[type[BaseException], ...] = (KeyboardInterrupt, MemoryError, RuntimeError)
_PACKAGE = str(Path(delta_tracker.__file__).parent)
_ROWS = 16


class Injection:
    """Trace function that counts the lines of the library, and raises an exception once, before one of them.

    Lines are left out at which Python neither allocates memory nor handles a signal: ``try:``, ``return`` of a local
    variable, and the end of a ``with`` statement.

    Args:
        exception: class of the exception; None to count only.
        number: number of lines that run before it.

    Attributes:
        is_paused: True while a call of the test itself runs, whose lines are not counted.
    """

    is_paused = False

    def __init__(self, exception: type[BaseException] | None = None, number: int = -1) -> None:
        self.exception = exception
        self.place = ""
        self.lines: list[tuple[CodeType, int]] = []
        self._number = number

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        """Count a line, and raise the exception at the chosen one."""
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line" and not self.place and not Injection.is_paused and frame.f_lasti not in _quiet(frame.f_code):
            if len(self.lines) == self._number and self.exception is not None:
                name = frame.f_code.co_filename.removeprefix(_PACKAGE + "/")
                self.place = f"{name}:{frame.f_code.co_qualname}:{frame.f_lineno}"
                sys.settrace(None)
                raise self.exception("injected")
            self.lines.append((frame.f_code, frame.f_lineno))
        return self

    def run(self, action: Callable[[], object]) -> BaseException | None:
        """Run an action. Return the injected exception if it leaves the action; other exceptions are raised."""
        before = sys.gettrace()
        is_enabled = gc.isenabled()
        gc.disable()  # a destructor at another line in each run would shift the numbers
        sys.settrace(self)
        try:
            action()
        except BaseException as error:
            if not self.place or "injected" not in str(error):
                raise
            return error.with_traceback(None)
        finally:
            sys.settrace(before)
            if is_enabled:
                gc.enable()
        return None

    @classmethod
    @contextlib.contextmanager
    def paused(cls) -> Iterator[None]:
        """Context manager in which no line is counted."""
        cls.is_paused = True
        try:
            yield
        finally:
            cls.is_paused = False

    @property
    def is_in_caller(self) -> bool:
        """True if the exception was raised in a function that only contains the call of a hook."""
        return self.place.split(":")[1] in HANDLERS


@cache
def _quiet(code: CodeType) -> frozenset[int]:
    """Return the offsets of the instructions at which nothing can be raised."""
    steps = list(dis.get_instructions(code))
    exits = [
        place
        for place in range(len(steps))
        if len(steps) > place + 3
        and all(each.opname == "LOAD_CONST" and each.argval is None for each in steps[place : place + 3])
    ]
    returns = [place - 1 for place in exits if steps[place - 1].opname == "SWAP"]
    ends = {*returns, *(place for place, each in enumerate(steps) if each.opname == "RETURN_VALUE")}
    returns += [place - 1 for place in ends if steps[place - 1].opname == "LOAD_FAST"]
    nothing = [place for place, each in enumerate(steps) if each.opname == "NOP"]
    return frozenset(steps[place].offset for place in (*exits, *returns, *nothing))


class PlainModel(nn.Module):
    """A table with sparse gradients and one with dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.EmbeddingBag(_ROWS, 2, sparse=True)
        self.dense = nn.Embedding(_ROWS, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the sum of the rows of both tables."""
        found: Tensor = self.sparse(ids[None]).sum() + self.dense(ids).sum()
        return found


class Trainer:
    """A plain model and its optimizers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = PlainModel()
        self.optimizers = [
            torch.optim.SGD([self.model.sparse.weight], lr=0.1),
            torch.optim.SGD([self.model.dense.weight], lr=0.1),
        ]

    def backward(self, *ids: int) -> None:
        """Compute the gradients of a batch."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(torch.tensor(ids)).backward()

    def update(self) -> None:
        """Run the optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()


@dataclass
class Copy:
    """Copy of all tables that a consumer keeps by applying its deltas.

    Args:
        rows: FQN to rows.
        former: possible copies of the rows at the last committed read.
    """

    rows: dict[str, Tensor]
    former: list[dict[str, Tensor]] = field(default_factory=list)

    def settle(self) -> None:
        """Note that a read was committed."""
        self.former = [{fqn: rows.clone() for fqn, rows in self.rows.items()}]

    def doubt(self) -> None:
        """Note that a read may have been committed."""
        self.former.append({fqn: rows.clone() for fqn, rows in self.rows.items()})


class World:
    """A trainer, its tracker, and a copy of the tables for each consumer."""

    def __init__(self, trainer: Trainer, mode: TrackingMode, *, delete_on_read: bool) -> None:
        self.trainer = trainer
        self.delete_on_read = delete_on_read
        self.tracker = ModelDeltaTrackerTrec(trainer.model, ["a", "b"], delete_on_read, mode=mode)
        self.tracker._model.found.features[next(iter(self.tracker.tables))] = ["feature"]  # for record_ids
        self.start = self.copy()
        self.copies = {name: self.copy() for name in self.tracker.consumers}
        self.handles: list[Any] = []
        # Several segments, carried rows, and a consumer that lags.
        self.train(1, 2)
        self.read("a")
        self.train(2, 3)
        self.tracker.step()
        self.read("b")
        self.train(4)
        self.read("a")
        self.train(5)

    def rows(self) -> dict[str, Tensor]:
        """Return a copy of all tables. This call is not interrupted."""
        with Injection.paused():
            return self.tracker.read_tables()

    def copy(self) -> Copy:
        """Return the copy of a consumer that has all rows."""
        found = Copy(self.rows())
        found.settle()
        return found

    def train(self, *ids: int) -> None:
        """Train a batch."""
        self.trainer.backward(*ids)
        self.trainer.update()

    def read(self, name: str, *, commit: bool = True) -> Delta:
        """Read a consumer's delta, and apply it to the consumer's copy."""
        delta = self.tracker.get_delta(name, commit=commit, with_values=True)
        self.apply(name, delta)
        if commit:
            self.copies[name].settle()
        return delta

    def apply(self, name: str, delta: Delta) -> None:
        """Check the old states of a delta, and apply it to the consumer's copy."""
        copy = self.copies[name]
        with Injection.paused():
            tables = list(delta.items())
        for fqn, rows in tables:
            if rows.states is not None and rows.known is not None:
                ids = rows.ids[rows.known]
                states = rows.states[rows.known]
                matches = [(each[fqn][ids] == states).all(dim=1) for each in copy.former]
                assert bool(torch.stack(matches).any(dim=0).all()), f"a known old state of {fqn} is wrong"
            assert rows.values is not None
            copy.rows[fqn][rows.ids] = rows.values

    def compare(self, name: str) -> None:
        """Check that the copy of a consumer equals the weights."""
        for fqn, rows in self.rows().items():
            different = (self.copies[name].rows[fqn] != rows).any(dim=1).nonzero().flatten().tolist()
            assert not different, f"rows {different} of {fqn} are lost for {name!r}"

    def sent(self, name: str) -> dict[str, list[int]]:
        """Read a consumer's delta, check its copy, and return the ids."""
        ids = {fqn: rows.ids.tolist() for fqn, rows in self.read(name).items()}
        self.compare(name)
        return ids

    def settle(self, *, calls_everything: bool) -> None:
        """Continue after the call, and check the promises."""
        tracker = self.tracker
        assert not tracker._log.lock._is_owned(), "the lock is held"  # type: ignore[attr-defined]
        for handle in self.handles:
            handle.release()
        try:
            tracker.num_pending("a")
            self.train(6)
            self.sent("a")
        except DetachedError:
            tracker.reattach()
        for name in self.copies.keys() - set(tracker.consumers):  # an interrupted call may have removed it
            del self.copies[name]
        for name in set(tracker.consumers) - self.copies.keys():
            tracker.clear(name)
            self.copies[name] = self.copy()
        self.train(6)
        tracker.step()
        for name in self.copies:
            self.sent(name)
        for row in (7, 8):
            self.train(row)
            for name in self.copies:
                ids = self.sent(name)
                assert all(each == [row] for each in ids.values()), f"{name!r} gets {ids} after a batch of row {row}"
        for name in self.copies:
            assert not any(self.sent(name).values()), "rows are sent again"
        if calls_everything:
            self._call_everything()

    def _call_everything(self) -> None:
        tracker = self.tracker
        self.train(9)
        tracker.commit(self.read("a", commit=False))
        self.copies["a"].settle()
        tracker.abort(tracker.get_delta("a", commit=False))
        tracker.add_consumer("later")
        tracker.compact()
        tracker.trigger_compaction()
        tracker.remove_consumer("later")
        tracker._show_gauges()
        tracker.memory()
        with tracker.reserve("a", holder="a test") as handle, handle.begin_copy() as copy:
            copy.read()
        state = tracker.state_dict()
        tracker.load_state_dict(state)
        tracker.clear("a")
        self.copies["a"] = self.copy()
        tracker.clear()
        for name in self.copies:
            self.copies[name] = self.copy()
        tracker.detach()
        tracker.reattach()
        for name in self.copies:
            self.sent(name)
        self.train(1)
        for name in self.copies:
            assert all(each == [1] for each in self.sent(name).values())
        tracker.detach()


@dataclass
class Call:
    """A call to interrupt.

    Args:
        action: makes the call, and does what its caller does with the result.
        failed: what the caller does if the call raises.
        is_training: True for a part of a training step, which errors must not reach.
    """

    action: Callable[[], object]
    failed: Callable[[BaseException], object] = lambda _: None
    is_training: bool = False


def _get_delta(world: World) -> Call:
    return Call(lambda: world.read("b"))


def _get_delta_over_an_uncommitted_one(world: World, *, commit: bool = True) -> Call:
    earlier = world.tracker.get_delta("b", commit=False, with_values=True)
    world.train(10)

    def failed(error: BaseException) -> None:
        try:
            world.tracker.commit(earlier)
        except StaleDeltaError:
            assert not isinstance(error, Exception), "a read that failed has aborted an earlier one"
            return
        world.apply("b", earlier)
        world.copies["b"].settle()

    return Call(lambda: world.read("b", commit=commit), failed)


def _get_delta_uncommitted(world: World) -> Call:
    return _get_delta_over_an_uncommitted_one(world, commit=False)


def _get_delta_without_states(world: World) -> Call:
    def action() -> None:
        delta = world.tracker.get_delta("b", with_states=False, with_values=True)
        world.apply("b", delta)
        world.copies["b"].settle()

    return Call(action)


def _get_delta_ids(world: World) -> Call:
    return Call(lambda: _received(world, world.tracker.get_delta_ids("b")))


def _get_unique(world: World) -> Call:
    return Call(lambda: _received(world, {fqn: rows.ids for fqn, rows in world.tracker.get_unique("b").items()}))


def _get_unique_ids(world: World) -> Call:
    return Call(lambda: _received(world, world.tracker.get_unique_ids("b")))


def _received(world: World, ids: dict[str, Tensor]) -> None:
    copy = world.copies["b"]
    for fqn, own in ids.items():
        copy.rows[fqn][own] = world.rows()[fqn][own]
    copy.settle()


def _commit(world: World) -> Call:
    delta = world.read("b", commit=False)
    world.train(10)

    def action() -> None:
        world.tracker.commit(delta)
        world.copies["b"].former = [{fqn: rows.clone() for fqn, rows in world.copies["b"].rows.items()}]

    return Call(action, lambda _: world.copies["b"].doubt())


def _abort(world: World) -> Call:
    delta = world.tracker.get_delta("b", commit=False)
    return Call(lambda: world.tracker.abort(delta))


def _step(world: World) -> Call:
    return Call(world.tracker.step)


def _clear(world: World) -> Call:
    def action() -> None:
        world.tracker.clear("b")
        world.copies["b"] = world.copy()

    return Call(action)


def _clear_all(world: World) -> Call:
    def action() -> None:
        world.tracker.clear()
        world.copies = {name: world.copy() for name in world.copies}

    return Call(action)


def _add_consumer(world: World) -> Call:
    def action() -> None:
        world.tracker.add_consumer("c")
        world.copies["c"] = world.copy()

    return Call(action)


def _remove_consumer(world: World) -> Call:
    def action() -> None:
        world.tracker.remove_consumer("b")
        del world.copies["b"]

    return Call(action)


def _rewind(world: World) -> Call:
    world.copies["b"].former += world.start.former  # known old states are those at the start
    return Call(lambda: None if world.delete_on_read else world.tracker.rewind("b"))


def _compact(world: World) -> Call:
    return Call(lambda: world.tracker.compact(0, 2))


def _trigger_compaction(world: World) -> Call:
    return Call(world.tracker.trigger_compaction)


def _mark_changed(world: World) -> Call:
    fqn = next(iter(world.tracker.tables))
    world.tracker.live.column_views(fqn)[0].data[11] += 1
    action = partial(world.tracker.mark_changed, fqn, torch.tensor([11]))
    return Call(action, lambda _: action())


def _num_pending(world: World) -> Call:
    return Call(lambda: world.tracker.num_pending("b"))


def _state_dict(world: World) -> Call:
    return Call(world.tracker.state_dict)


def _load_state_dict(world: World) -> Call:
    state = world.tracker.state_dict()
    return Call(lambda: world.tracker.load_state_dict(state))


def _load_nothing(world: World) -> Call:
    return Call(lambda: world.tracker.load_state_dict({}))


def _detach(world: World) -> Call:
    return Call(world.tracker.detach)


def _reattach(world: World) -> Call:
    return Call(world.tracker.reattach)


def _reserve(world: World) -> Call:
    return Call(lambda: world.handles.append(world.tracker.reserve("b", holder="a test")))


def _reserved(world: World) -> Any:
    handle = world.tracker.reserve("b", holder="a test")
    world.handles.append(handle)
    return handle


def _release(world: World) -> Call:
    return Call(_reserved(world).release)


def _begin_copy(world: World) -> Call:
    handle = _reserved(world)
    return Call(lambda: world.handles.insert(0, handle.begin_copy()))


def _release_a_copy(world: World) -> Call:
    copy = _reserved(world).begin_copy()
    world.handles.insert(0, copy)
    return Call(copy.release)


def _make_pending(world: World) -> Call:
    world.read("b")
    for rows in world.copies["b"].rows.values():
        rows[12] += 1
    handle = _reserved(world)

    def action() -> None:
        for fqn in world.copies["b"].rows:
            handle.make_pending(fqn, torch.tensor([12]))

    return Call(action, lambda _: action())


def _annotate(world: World) -> Call:
    handle = _reserved(world)
    return Call(lambda: handle.annotate({"version": 3}))


def _optimizer_step(world: World) -> Call:
    world.trainer.backward(3, 10)
    return Call(world.trainer.update, is_training=True)


def _first_optimizer_step(world: World) -> Call:
    world.trainer.optimizers[0] = torch.optim.SparseAdam([world.trainer.model.sparse.weight], lr=0.1)
    return _optimizer_step(world)


def _closure(world: World) -> Call:
    optimizer = torch.optim.SGD([world.trainer.model.sparse.weight], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = world.trainer.model(torch.tensor([3, 10]))
        loss.backward()
        return loss

    return Call(lambda: optimizer.step(closure), is_training=True)


def _all_rows(world: World) -> Call:
    optimizer = torch.optim.RMSprop([world.trainer.model.sparse.weight], lr=0.1)
    optimizer.zero_grad()
    world.trainer.model.sparse.weight.grad = torch.ones(_ROWS, 2)

    def failed(_: BaseException) -> None:
        world.sent("b")
        optimizer.step()  # until then, all rows count as changed

    return Call(optimizer.step, failed, is_training=True)


def _backward(world: World) -> Call:
    return Call(lambda: world.trainer.backward(3, 10), is_training=True)


def _record_ids(world: World) -> Call:
    return Call(lambda: world.tracker.record_ids(_Keyed()))


def _record_embeddings(world: World) -> Call:
    if world.tracker.mode is not TrackingMode.EMBEDDING:
        return Call(lambda: None)
    world.read("b")
    values = world.tracker.read_rows(next(iter(world.tracker.tables)), torch.tensor([3]))
    return Call(lambda: world.tracker.record_embeddings(_Keyed(), values))


class _Keyed:
    """A lookup of row 3 of the first table."""

    def keys(self) -> list[str]:
        return ["feature"]

    def values(self) -> Tensor:
        return torch.tensor([3])

    def length_per_key(self) -> list[int]:
        return [1]


CALLS: dict[str, Callable[[World], Call]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        _get_delta, _get_delta_uncommitted, _get_delta_over_an_uncommitted_one, _get_delta_without_states,
        _get_delta_ids, _get_unique, _get_unique_ids, _commit, _abort, _step, _clear, _clear_all, _add_consumer,
        _remove_consumer, _rewind, _compact, _trigger_compaction, _mark_changed, _num_pending, _state_dict,
        _load_state_dict, _load_nothing, _detach, _reattach, _reserve, _release, _begin_copy, _release_a_copy,
        _make_pending, _annotate, _optimizer_step, _first_optimizer_step, _closure, _all_rows, _backward, _record_ids,
        _record_embeddings,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """An exception at a line of a call.

    Args:
        exception: its class.
        number: number of lines that run before it.
        retries: True if the call is made again.
    """

    exception: type[BaseException]
    number: int
    retries: bool


def points(call: str, make: Callable[[], World]) -> list[Point]:
    """Return the points of a call: each exception at each line of the library, at the first or last time that it runs.

    KeyboardInterrupt is raised at both.
    """
    world, count = make(), Injection()
    count.run(CALLS[call](world).action)
    first = {line: number for number, line in reversed(list(enumerate(count.lines)))}.values()
    last = {line: number for number, line in enumerate(count.lines)}.values()
    numbers = {KeyboardInterrupt: {*first, *last}, MemoryError: {*first}, RuntimeError: {*last}}
    return [
        Point(exception, number, retries=(number + place) % 2 == 1)
        for place, exception in enumerate(EXCEPTIONS)
        for number in sorted(numbers[exception])
    ]


def broken(call: str, make: Callable[[], World], point: Point) -> str:
    """Run a call with an exception at a point, and continue. Return the promise that breaks; empty if none does."""
    world = make()
    made = CALLS[call](world)
    injection = Injection(point.exception, point.number)
    place = "the call"
    try:
        error = injection.run(made.action)
        place = f"{point.exception.__name__} at {injection.place}"
        is_error = isinstance(error, Exception)
        if made.is_training and is_error and not injection.is_in_caller:
            return f"{place}: the error reaches the training step"
        if error is not None:
            made.failed(error)
            del error
            if point.retries:
                with contextlib.suppress(DeltaTrackerError):
                    made.action()
        world.settle(calls_everything=point.number % 4 == 0)
    except Exception as found:  # noqa: BLE001  all are reported
        return f"{place}: {type(found).__name__}: {found}"
    return ""


def problems(call: str, make: Callable[[], World], sample: int | None = None) -> list[str]:
    """Run all points of a call, or a sample of them, and return the promises that break."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small operations are slower on several
    try:
        every = points(call, make)
        if sample is not None:
            every = random.Random(call).sample(every, min(sample, len(every)))
        return [problem for point in every if (problem := broken(call, make, point))]
    finally:
        torch.set_num_threads(num_threads)


def plain(mode: TrackingMode, *, delete_on_read: bool) -> World:
    """Return a world without TorchRec's sharding."""
    return World(Trainer(), mode, delete_on_read=delete_on_read)


WORLDS: dict[str, Callable[[], World]] = {
    "ids": partial(plain, TrackingMode.ID_ONLY, delete_on_read=False),
    "values": partial(plain, TrackingMode.EMBEDDING, delete_on_read=True),
}


def main() -> int:
    """Run the points of some calls, print those that break a promise, and return the exit code."""
    is_broken = False
    for kind, make in WORLDS.items():
        for call in sys.argv[1:] or CALLS:
            found = problems(call, make)
            is_broken |= bool(found)
            print(f"{kind}, {call}: {len(found)} break a promise", *found, sep="\n    ", flush=True)
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
