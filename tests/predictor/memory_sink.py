"""Row store in memory that fails after a chosen operation and calls a reader after each one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from delta_tracker.errors import SinkError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.sinks.row_sink import RowSink, SinkState

Key = tuple[str, str, int]  # stream, table, and raw id or global row id


@dataclass
class Stored:
    """Content of a row store.

    Attributes:
        states: stream to its encoded state.
        current: stream that readers read.
        rows: key to version and row.
        defaults: key of a default row to version and row.
        owners: key of a row to its raw id in the stored map.
        log: stream and table to logged rows and raw ids.
        on_operation: called after each atomic operation.
        num_operations: number of operations.
    """

    states: dict[str, bytes] = field(default_factory=dict)
    current: str | None = None
    rows: dict[Key, tuple[int, Tensor]] = field(default_factory=dict)
    defaults: dict[Key, tuple[int, Tensor]] = field(default_factory=dict)
    owners: dict[Key, int] = field(default_factory=dict)
    log: defaultdict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    on_operation: Callable[[], None] = lambda: None
    num_operations: int = 0

    def copy(self) -> Stored:
        """Return a store with the same content."""
        log: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        log.update({key: list(entries) for key, entries in self.log.items()})
        return Stored(dict(self.states), self.current, dict(self.rows), dict(self.defaults), dict(self.owners), log)

    def state(self) -> SinkState | None:
        """Return the state that readers read."""
        return None if self.current is None else SinkState.from_json(self.states[self.current])

    def done(self) -> None:
        """Count an operation."""
        self.num_operations += 1
        self.on_operation()


class MemorySink(RowSink):
    """Sink of a :class:`Stored`, in which each row, each owner and each state is an operation.

    Attributes:
        fails_after: number of operations after which the next one takes effect and then fails, None for none.
    """

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.fails_after: int | None = None
        self.is_open = False

    def open(self) -> None:
        self.is_open = True

    def _done(self) -> None:
        self.stored.done()
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                self.fails_after, self.is_open = None, False
                raise SinkError("memory", "the connection was lost")

    def _check(self) -> None:
        assert self.is_open, "a call before open()"

    def states(self) -> list[SinkState]:
        self._check()
        return [SinkState.from_json(state) for state in self.stored.states.values()]

    def current(self) -> str | None:
        self._check()
        return self.stored.current

    def begin(self, state: SinkState) -> None:
        self._check()
        self.stored.states[state.stream] = state.to_json()
        self._done()

    def write(self, stream: str, table: str, keys: Tensor, values: Tensor, version: int) -> None:
        self._check()
        assert len(keys) == len(values) == len(keys.unique()) > 0  # type: ignore[no-untyped-call]
        for key, row in zip(keys.tolist(), values.clone(), strict=True):
            self.stored.rows[stream, table, key] = version, row
            self._done()

    def write_defaults(self, stream: str, table: str, slots: Tensor, values: Tensor, version: int) -> None:
        self._check()
        for slot, row in zip(slots.tolist(), values.clone(), strict=True):
            self.stored.defaults[stream, table, slot] = version, row
            self._done()

    def delete(self, stream: str, table: str, keys: Tensor) -> None:
        self._check()
        for key in keys.tolist():
            self.stored.rows.pop((stream, table, key), None)
            self._done()

    def delete_defaults(self, stream: str, table: str, slots: Tensor) -> None:
        self._check()
        for slot in slots.tolist():
            self.stored.defaults.pop((stream, table, slot), None)
            self._done()

    def owners(self, stream: str, table: str, slots: Tensor) -> Tensor:
        self._check()
        assert len(slots) <= 1 << 16
        assert bool((slots[1:] > slots[:-1]).all())
        return torch.tensor([self.stored.owners.get((stream, table, slot), NO_OWNER) for slot in slots.tolist()])

    def set_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        self._check()
        for slot, owner in zip(slots.tolist(), owners.tolist(), strict=True):
            self.stored.owners[stream, table, slot] = owner
            self._done()

    def log_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        self._check()
        for entry in zip(slots.tolist(), owners.tolist(), strict=True):
            self.stored.log[stream, table].append(entry)
            self._done()

    def logged_owners(self, stream: str, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        self._check()
        entries = list(self.stored.log[stream, table])
        for begin in range(0, len(entries), 3):
            slots, owners = zip(*entries[begin : begin + 3], strict=True)
            yield torch.tensor(slots), torch.tensor(owners)

    def finish(self, state: SinkState) -> None:
        self._check()
        self.stored.states[state.stream], self.stored.current = state.to_json(), state.stream
        self._done()

    def clear_owner_log(self, state: SinkState) -> None:
        self._check()
        for stream, table in list(self.stored.log):
            if stream == state.stream:
                del self.stored.log[stream, table]
                self._done()
        self.stored.states[state.stream] = state.to_json()
        self._done()

    def remove(self, stream: str) -> None:
        self._check()
        assert stream != self.stored.current
        if stream not in self.stored.states:
            return
        state = SinkState.from_json(self.stored.states[stream])
        for table, spec in state.tables.items():
            # As a store does that cannot list its keys.
            slots = range(spec.num_rows)
            keys = {self.stored.owners.get((stream, table, slot), NO_OWNER) for slot in slots}
            keys |= {owner for _, owner in self.stored.log.get((stream, table), ())}
            for key in keys if table in state.identities else slots:
                if self.stored.rows.pop((stream, table, key), None) is not None:
                    self._done()
            for slot in state.default_slots.get(table, ()):
                if self.stored.defaults.pop((stream, table, slot), None) is not None:
                    self._done()
            for slot in slots:
                self.stored.owners.pop((stream, table, slot), None)
            self.stored.log.pop((stream, table), None)
            self._done()
        del self.stored.states[stream]
        self._done()

    def close(self) -> None:
        self.is_open = False
