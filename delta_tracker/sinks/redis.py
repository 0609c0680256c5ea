"""Row store in Redis; requires the extra ``redis``.

Notation: ``N`` is the number of rows in a call, ``D`` the number of columns of the table.

Keys, which all begin with a prefix:

===============================  =======================================================================================
``PREFIX:current``               id of the stream that readers read
``PREFIX:streams``               set of the ids of all streams
``PREFIX:writer``                JSON that identifies the writer
``PREFIX:STREAM:state``          JSON of the state, see :class:`~delta_tracker.sinks.row_sink.SinkState`
``PREFIX:STREAM:r:TABLE:ID``     row; ``ID`` is its global row id or raw id
``PREFIX:STREAM:d:TABLE:SLOT``   default row; ``SLOT`` is its global row id
``PREFIX:STREAM:o:TABLE:N``      owners of rows ``65,536 N`` to ``65,536 N + 65,535``, 8 bytes each
``PREFIX:STREAM:l:TABLE``        log of owners, a list of entries
===============================  =======================================================================================

See :mod:`delta_tracker.sinks.stored_rows` for the encoding of rows and owners.
"""

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, count, pairwise
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from delta_tracker.errors import SINK_CLOSED, SINK_FORKED, InvalidArgumentError, MalformedSinkError, SinkError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.sinks.redis_rows import MAX_BATCH_BYTES, MAX_BATCH_ROWS, RedisServer
from delta_tracker.sinks.row_sink import RowSink, SinkState
from delta_tracker.sinks.stored_rows import (
    OWNER_BYTES,
    decode_log,
    decode_owners,
    encode_log,
    encode_owners,
    encode_rows,
)

_SLOTS_PER_KEY = 1 << 16
_MAX_GAP = 32  # rows between two runs of rows whose owners are read together

# Runs commands if the writer is this one. A script is atomic, also in the append-only file. The server is no cluster,
# so the keys of the commands need no declaration. KEYS: writer. ARGV: writer; length and words of each command.
_RUN = (
    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end "
    "local i = 2 while i < #ARGV do local last = i + ARGV[i] redis.call(unpack(ARGV, i + 1, last)) i = last + 1 end "
    "return 1"
)
# KEYS: writer. ARGV: former value or '', new value
_TAKE = (
    "local held = redis.call('GET', KEYS[1]) or '' "
    "if held ~= ARGV[1] then return 0 end redis.call('SET', KEYS[1], ARGV[2]) return 1"
)
_LOST_KEYS = (
    "Set maxmemory-policy noeviction. The next sync() or follow() completes the version. If rows were evicted too, "
    "delete the keys of the prefix first: they are then written again from the stream"
)


class _Writer(msgspec.Struct, forbid_unknown_fields=True):
    token: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    host: str
    pid: int
    client: Annotated[int, Meta(ge=0)]  # id of its connection


class RedisSink(RowSink):
    """Sink that writes a stream to one Redis server (6.2 or newer). Pass it to :class:`~delta_tracker.Predictor`.

    Rows are written in batches of at most 1,000 rows and about 1 MiB. Each batch is atomic. The server can handle
    requests of other clients between batches.

    A prefix has only one writer, and each batch verifies that this sink is the writer. Another sink can become the
    writer only after the connection of this sink has ended. After that, each write of this sink raises SinkError and
    changes nothing.

    Depending on ``appendfsync``, Redis may acknowledge a batch before the batch is durable. If the server crashes or
    fails over to a replica, the newest batches may be lost. The predictor then continues from the earlier consistent
    state of the store. If the whole store is lost, the predictor writes a snapshot.

    Args:
        url: ``redis://host:port/db``, ``rediss://...`` or ``unix://...``.
        prefix: prefix of all keys. Use a different prefix for each model.
        timeout_seconds: timeout for connecting, and for each response.

    Raises:
        InvalidArgumentError: for an invalid URL, an empty prefix, or a timeout that is not positive.
        MissingExtraError: if the package ``redis`` is not installed.

    Example:
        >>> sink = RedisSink("redis://127.0.0.1:6379/0", prefix="ads")
        >>> # Predictor(sink, "s3://bucket/stream").follow()
    """

    def __init__(self, url: str, *, prefix: str = "delta_tracker", timeout_seconds: float = 10) -> None:
        self._server = RedisServer(url, prefix, timeout_seconds)
        self._key, self._keys = self._server.key, self._server.keys
        self._pid = os.getpid()
        self._redis: Any = None
        self._writer = b""  # value of the writer's key while this object is the writer
        self._script: Any = None

    def open(self) -> None:
        """Connect and become the only writer; see :meth:`RowSink.open`.

        Raises:
            SinkError: if another connected client is the writer; or if the server cannot be used, is a cluster, is
                older than 6.2, or may evict keys that have no expiration time.
        """
        self._check_process()
        if self._redis is not None and self._is_writer():
            return
        self._disconnect()
        try:
            with self._server.errors():
                self._connect()
        except BaseException:
            self._disconnect()
            raise

    def states(self) -> list[SinkState]:
        with self._server.errors():
            names = sorted(self._client().smembers(self._key("streams")))
            streams = [name.decode(errors="replace") for name in names]
            stored = self._client().mget([self._key(stream, "state") for stream in streams]) if streams else []
        states = []
        for stream, data in zip(streams, stored, strict=True):
            if data is None:
                raise MalformedSinkError(f"its stream {stream}", "it has no state")
            states.append(SinkState.from_json(data))
            if states[-1].stream != stream:
                raise MalformedSinkError(f"its stream {stream}", "it has the state of another stream")
        return states

    def current(self) -> str | None:
        with self._server.errors():
            data = self._client().get(self._key("current"))
        return None if data is None else str(data, errors="replace")

    def begin(self, state: SinkState) -> None:
        stream = state.stream
        self._run(("SADD", self._key("streams"), stream), ("SET", self._key(stream, "state"), state.to_json()))

    def write(self, stream: str, table: str, keys: Tensor, values: Tensor, version: int) -> None:
        self._write(self._keys(stream, "r", table, keys.tolist()), values, version)

    def write_defaults(self, stream: str, table: str, slots: Tensor, values: Tensor, version: int) -> None:
        self._write(self._keys(stream, "d", table, slots.tolist()), values, version)

    def delete(self, stream: str, table: str, keys: Tensor) -> None:
        self._delete(self._keys(stream, "r", table, keys.tolist()))

    def delete_defaults(self, stream: str, table: str, slots: Tensor) -> None:
        self._delete(self._keys(stream, "d", table, slots.tolist()))

    def owners(self, stream: str, table: str, slots: Tensor) -> Tensor:
        found = torch.empty_like(slots)
        runs = _runs(slots, _MAX_GAP)
        for first in range(0, len(runs), MAX_BATCH_ROWS):
            some = runs[first : first + MAX_BATCH_ROWS]
            with self._server.errors():
                pipeline = self._client().pipeline(transaction=False)
                for begin, end in some:
                    key, low = self._owners_at(stream, table, int(slots[begin]))
                    high = low + (int(slots[end - 1]) - int(slots[begin]) + 1) * OWNER_BYTES
                    pipeline.getrange(key, low, high - 1)
                stored = pipeline.execute()
            for (begin, end), data in zip(some, stored, strict=True):
                of_run = slots[begin:end] - slots[begin]
                found[begin:end] = decode_owners(data, int(of_run[-1]) + 1)[of_run]
        return found

    def set_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        data, runs = encode_owners(owners), _runs(slots, 0)
        for first in range(0, len(runs), MAX_BATCH_ROWS):
            commands: list[Sequence[object]] = []
            for begin, end in runs[first : first + MAX_BATCH_ROWS]:
                key, low = self._owners_at(stream, table, int(slots[begin]))
                commands.append(("SETRANGE", key, low, data[begin * OWNER_BYTES : end * OWNER_BYTES]))
            self._run(*commands)

    def log_owners(self, stream: str, table: str, slots: Tensor, owners: Tensor) -> None:
        self._run(("RPUSH", self._key(stream, "l", table), encode_log(slots, owners)))

    def logged_owners(self, stream: str, table: str) -> Iterator[tuple[Tensor, Tensor]]:
        for number in count():
            with self._server.errors():
                entry = self._client().lindex(self._key(stream, "l", table), number)
            if entry is None:
                return
            yield decode_log(entry, table)

    def finish(self, state: SinkState) -> None:
        stream = state.stream
        self._run(("MSET", self._key(stream, "state"), state.to_json(), self._key("current"), stream))

    def clear_owner_log(self, state: SinkState) -> None:
        logs = [("UNLINK", self._key(state.stream, "l", table)) for table in state.identities]
        self._run(*logs, ("SET", self._key(state.stream, "state"), state.to_json()))

    def remove(self, stream: str) -> None:
        if stream == self.current():
            raise InvalidArgumentError("stream", stream, "Call finish() of another stream first: readers read this one")
        state = next((state for state in self.states() if state.stream == stream), None)
        if state is None:
            return
        for table, spec in state.tables.items():
            for keys in self._held_keys(state, table):
                self._delete(self._keys(stream, "r", table, keys))
            self._delete(self._keys(stream, "d", table, state.default_slots.get(table, ())))
            # the map and the log name the rows, so they are deleted after the rows
            if table in state.identities:
                parts = range(-(-spec.num_rows // _SLOTS_PER_KEY))
                self._delete([*self._keys(stream, "o", table, parts), self._key(stream, "l", table)])
        self._run(("UNLINK", self._key(stream, "state")), ("SREM", self._key("streams"), stream))

    def close(self) -> None:
        if self._redis is not None and os.getpid() == self._pid:
            with suppress(SinkError):  # the end of the connection is enough for the next writer
                self._run(("UNLINK", self._key("writer")))
        self._disconnect()

    def _connect(self) -> None:
        self._redis = self._server.client(is_single=True)
        self._check_server()
        token = secrets.token_hex(16)
        self._redis.client_setname(token)
        writer = _Writer(token, socket.gethostname(), os.getpid(), self._redis.client_id())
        held = self._redis.get(self._key("writer"))
        if held is not None:
            self._check_writer(held)
        value = msgspec.json.encode(writer)
        if not self._redis.eval(_TAKE, 1, self._key("writer"), held or b"", value):
            raise SinkError.busy(self._server.name, "another process, which became it at this moment,")
        self._script = self._redis.register_script(_RUN)
        self._writer = value

    def _check_server(self) -> None:
        """Raise SinkError if the server may evict rows, is a cluster, or is too old."""
        facts = self._redis.info("everything")
        version = str(facts.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
            raise SinkError(self._server.name, f"its version is {version}", "Use Redis 6.2 or newer")
        if facts.get("cluster_enabled"):
            reason = "it is a cluster, which has no operations on keys of several nodes"
            raise SinkError(self._server.name, reason, "Use a single server")
        policy = str(facts.get("maxmemory_policy", "unknown"))
        if policy != "noeviction" and not policy.startswith("volatile-"):
            reason = f"it may evict rows: maxmemory-policy is {policy}"
            raise SinkError(self._server.name, reason, "Set maxmemory-policy noeviction, or one of volatile-*")

    def _check_writer(self, held: bytes) -> None:
        """Raise SinkError if the writer is still connected. ``held`` is the stored JSON that identifies the writer."""
        try:
            writer = msgspec.json.decode(held, type=_Writer)
        except msgspec.DecodeError as error:
            raise MalformedSinkError("its writer", str(error)) from error
        # After a restart of the server, another connection may have the same id, but not the same name.
        clients = self._redis.client_list(client_id=[writer.client])
        if any(each.get("name") == writer.token for each in clients):
            raise SinkError.busy(self._server.name, f"process {writer.pid} of host {writer.host}")

    def _is_writer(self) -> bool:
        """Return True if the connection works and this object is still the writer."""
        try:
            with self._server.errors():
                # A new connection has another name: the client reconnects silently.
                return bool(
                    self._redis.get(self._key("writer")) == self._writer
                    and self._redis.client_getname() == msgspec.json.decode(self._writer, type=_Writer).token
                )
        except SinkError:
            return False

    def _client(self) -> Any:  # noqa: ANN401  the package is optional
        self._check_process()
        if self._redis is None:
            raise SinkError(self._server.name, *SINK_CLOSED)
        return self._redis

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise SinkError(self._server.name, *SINK_FORKED)

    def _disconnect(self) -> None:
        redis, self._redis, self._writer = self._redis, None, b""
        if redis is not None and os.getpid() == self._pid:
            redis.close()

    def _run(self, *commands: Sequence[object]) -> None:
        """Run commands atomically. If another process became the writer, raise SinkError and change nothing."""
        self._client()
        with self._server.errors():
            words = chain.from_iterable((len(each), *each) for each in commands)
            is_done = self._script(keys=[self._key("writer")], args=[self._writer, *words])
        if is_done:
            return
        with self._server.errors():
            is_lost = self._redis.get(self._key("writer")) is None
        if is_lost:
            raise SinkError(self._server.name, f"its key {self._key('writer')} was deleted or evicted", _LOST_KEYS)
        remedy = "Stop one of the two writers: a row store has one writer"
        raise SinkError.busy(self._server.name, "another process, which became it meanwhile,").with_remedy(remedy)

    def _write(self, keys: list[str], values: Tensor, version: int) -> None:
        row_bytes = values.shape[1] * values.dtype.itemsize + len(keys[0]) if keys else 1
        num_rows = max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // row_bytes))
        for begin in range(0, len(keys), num_rows):
            rows = encode_rows(values[begin : begin + num_rows], version)
            pairs = zip(keys[begin : begin + num_rows], rows, strict=True)
            self._run(("MSET", *chain.from_iterable(pairs)))

    def _delete(self, keys: list[str]) -> None:
        for begin in range(0, len(keys), MAX_BATCH_ROWS):
            self._run(("UNLINK", *keys[begin : begin + MAX_BATCH_ROWS]))

    def _owners_at(self, stream: str, table: str, slot: int) -> tuple[str, int]:
        """Return the key of the value that contains the owner of row ``slot``, and the byte offset in the value."""
        number, place = divmod(slot, _SLOTS_PER_KEY)
        return self._key(stream, "o", table, number), place * OWNER_BYTES

    def _held_keys(self, state: SinkState, table: str) -> Iterator[list[int]]:
        """Yield lists of at most 65,536 ids, which together contain the ids of all stored rows of a table."""
        num_rows = state.tables[table].num_rows
        for begin in range(0, num_rows, _SLOTS_PER_KEY):
            slots = torch.arange(begin, min(begin + _SLOTS_PER_KEY, num_rows), device="cpu")
            if table not in state.identities:
                yield slots.tolist()
                continue
            owners = self.owners(state.stream, table, slots)
            yield owners[owners != NO_OWNER].tolist()
        if table in state.identities:
            for _, owners in self.logged_owners(state.stream, table):
                yield owners[owners != NO_OWNER].tolist()


def _runs(slots: Tensor, max_gap: int) -> list[tuple[int, int]]:
    """Return index ranges that split ascending ``slots`` by key and at each gap of more than ``max_gap`` rows."""
    if not len(slots):
        return []
    parts = slots // _SLOTS_PER_KEY
    is_first = (slots[1:] - slots[:-1] > max_gap + 1) | (parts[1:] != parts[:-1])
    edges = [0, *(is_first.nonzero().flatten() + 1).tolist(), len(slots)]
    return list(pairwise(edges))
