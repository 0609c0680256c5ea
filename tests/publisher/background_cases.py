"""Cases for a publisher that publishes in the background on all ranks during training."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TopK, TrackingMode, Upkeep
from delta_tracker.errors import FencedError
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.publisher.exchange import Vote
from delta_tracker.stream.format.codec import decode_rows, encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.retention import Retention
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.tracker.rank_group import Gathering
from delta_tracker.types import DeltaRows
from tests.heartbeats import read_heartbeats
from tests.models import Spec, Table, batch, ordinary_optimizer, shard
from tests.notifiers import LocalNotifier
from tests.publisher.flights import finish
from tests.publisher.publishing_cases import attempt, empty_model
from tests.stores.rules import fails, on, trickles
from tests.stores.wrapped import WrappedStorage
from tests.waiting import eventually

_PATIENCE = 60.0

NUM_VOTES = 10  # in which a snapshot and three deltas appear


class Trainer:
    """A rank's model in training, with a copy of its weights after each batch."""

    def __init__(
        self, rank: int, world_size: int, consumers: list[str] | None = None, *, is_small: bool = False, **kwargs: Any
    ) -> None:
        small = Spec([Table("row", 17, "row")], bag=True)  # a batch takes a third of the time
        self.spec = small if is_small else Spec.every_sharding(world_size, bag=True)
        self.spec.tables.append(Table("replica", 7, "data"))
        self.spec.features.append("replica")
        self.model = shard(self.spec)
        self.model.module.dense.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.optimizer = ordinary_optimizer(self.model, "Adam", lr=0.1)
        self.tracker = ModelDeltaTracker(self.model, consumers, **kwargs)
        self.generator = torch.Generator().manual_seed(rank)
        self.held: dict[int, tuple[dict[str, list[Tensor]], dict[str, Tensor]]] = {}

    def step(self, publisher: Publisher | None = None) -> None:
        self.optimizer.zero_grad()
        self.model(batch(self.spec, self.generator)).backward()
        self.optimizer.step()
        self.model.module.dense.calls += 1
        self.tracker.step()
        self.remember()
        if publisher is not None:
            publisher.step()

    def remember(self) -> None:
        tables = {fqn: [view.clone() for view in self.tracker.live.column_views(fqn)] for fqn in self.tracker.shards}
        dense = {name: tensor.detach().clone() for name, tensor in self.model.module.dense.state_dict().items()}
        self.held[self.tracker.num_batches] = tables, dense

    def assert_equal(self, manifest: Manifest, model: dict[str, Tensor]) -> None:
        """Check that the predictor equals this rank's shards at the version's cut."""
        tables, _ = self.held[manifest.batches[1]]
        for fqn, spec in self.tracker.shards.items():
            rows = slice(spec.row_offset, spec.row_offset + spec.num_rows)
            for (first, end), view in zip(spec.columns, tables[fqn], strict=True):
                assert torch.equal(model[fqn][rows, first:end], view), (fqn, manifest.version)


class Slow:
    """Lets the writes of parts wait before each buffer until they are released."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.is_waiting = threading.Event()
        self.rule = trickles(self._wait)

    def _wait(self, *_: object) -> None:
        self.is_waiting.set()
        assert self.gate.acquire(timeout=_PATIENCE)

    def end(self) -> None:
        for _ in range(1000):
            self.gate.release()


def follow(trainer: Trainer, url: str) -> list[Manifest]:
    """Apply the versions one by one; each must equal the trainer at its cut, including dense tensors."""
    held = empty_model(trainer.tracker)
    _, last = trainer.held[trainer.tracker.num_batches]
    held |= {f"dense.{name}": torch.full_like(tensor, -1) for name, tensor in last.items()}
    predictor = Predictor(held, url)
    seen: list[Manifest] = []
    head = StreamLog(Storage(url)).head()
    assert head is not None
    while predictor.version != head.version:
        predictor.sync(limit=1)
        manifest = predictor.manifest
        assert manifest is not None
        if seen and manifest.version == seen[-1].version:
            continue  # a claim
        seen.append(manifest)
        trainer.assert_equal(manifest, held)
        if manifest.dense:
            _, expected = trainer.held[manifest.batches[1]]
            assert sorted(manifest.dense) == [f"dense.{name}" for name in sorted(expected)]
            if dist.get_rank() == 0:
                assert all(torch.equal(held[f"dense.{name}"], tensor) for name, tensor in expected.items())
    return seen


def cadence(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """Publish every third batch; all ranks cut at the same batch, also if one is slower."""
    trainer = Trainer(rank, world_size)
    with trainer.tracker:
        publisher = Publisher(trainer.tracker, url, dense=trainer.model.module.dense, cadence=Cadence(batches=3))
        for number in range(30):
            trainer.step(publisher)
            if number % world_size == rank:
                threading.Event().wait(0.01)
        stepped = publisher.version
        publisher.flush()
        trainer.remember()
        last = publisher.publish()
        dist.barrier()
        seen = follow(trainer, url)
        publisher.close()
        assert publisher.error is None
        return {
            "kinds": [each.kind for each in seen],
            "cuts": [each.batches for each in seen],
            "last": last.version,
            "stepped": stepped,
        }


def slow_store(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """While a version waits for the store, training continues, no other version starts, and no row is lost."""
    trainer = Trainer(rank, world_size, is_small=True)
    with trainer.tracker:
        storage, slow = WrappedStorage(Storage(url, create=True)), Slow()
        publisher = Publisher(trainer.tracker, storage, cadence=Cadence(batches=1))
        for _ in range(3):
            trainer.step(publisher)
        publisher.flush()
        storage.rules.append(slow.rule)
        version = publisher.version
        for _ in range(30):
            trainer.step(publisher)
        assert slow.is_waiting.wait(_PATIENCE)
        waited = publisher.version - version
        slow.end()
        publisher.flush()
        storage.rules.clear()
        trainer.remember()
        publisher.publish()
        dist.barrier()
        seen = follow(trainer, url)
        publisher.close()
        return {"waited": waited, "cuts": [each.batches for each in seen]}


def copied_while_training(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """A snapshot whose rows change while they are copied equals the trainer at its cut."""
    trainer = Trainer(rank, world_size)
    with trainer.tracker:
        slow = Slow()
        storage = WrappedStorage(Storage(url, create=True), slow.rule)
        publisher = Publisher(
            trainer.tracker, storage, dense=["dense.weight", "dense.bias", "dense.calls"], cadence=Cadence(batches=2)
        )
        for _ in range(4):
            trainer.step(publisher)
        assert slow.is_waiting.wait(_PATIENCE)
        num_steps = 0
        while slow.is_waiting.is_set() and num_steps < 60:
            slow.gate.release()
            trainer.step(publisher)
            num_steps += 1
        slow.end()
        publisher.flush()
        trainer.remember()
        publisher.publish()
        dist.barrier()
        seen = follow(trainer, url)
        names = trainer.tracker.consumers
        publisher.close()
        return {
            "kinds": [each.kind for each in seen],
            "first": seen[0].batches,
            "listed": sum(block.num_rows for part in seen[0].parts for block in part.blocks if block.ids == "list"),
            "consumers": names,
        }


def broken_store(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """A temporary store failure affects neither training nor the stream; a fenced publisher stops permanently."""
    trainer = Trainer(rank, world_size, ["first", "second"], is_small=True)
    with trainer.tracker:
        storage = WrappedStorage(Storage(url, create=True))
        publisher = Publisher(trainer.tracker, storage, "first", cadence=Cadence(batches=2))
        for _ in range(6):
            trainer.step(publisher)
        publisher.flush()
        version = publisher.version
        if rank == world_size - 1:
            storage.rules.append(fails(on("put"), "the network is unreachable"))
        for _ in range(8):
            trainer.step(publisher)
        attempt(publisher.flush)
        error = str(publisher.error)
        assert publisher.version == version
        storage.rules.clear()
        for _ in range(8):
            trainer.step(publisher)
        publisher.flush()
        assert publisher.error is None
        trainer.remember()
        publisher.publish()
        dist.barrier()
        follow(trainer, url)
        other = Publisher(trainer.tracker, url, "second")
        for _ in range(6):
            trainer.step(publisher)
        flushed = attempt(publisher.flush)
        assert isinstance(publisher.error, FencedError)
        for _ in range(3):
            trainer.step(publisher)
        publisher.close()
        trainer.remember()
        other.publish()
        dist.barrier()
        follow(trainer, url)
        other.close()
        return {"error": error, "flushed": flushed}


def seldom_votes(rank: int, world_size: int, url: str, fails: bool) -> dict[str, Any]:
    """With votes at every fourth call, the other calls send nothing, and a rank that fails stays in step."""
    trainer = Trainer(rank, world_size, is_small=True)
    with trainer.tracker:
        cadence = Cadence(batches=3, vote_every=4)
        publisher = Publisher(trainer.tracker, url, dense=trainer.model.module.dense, cadence=cadence)
        exchange = publisher._versions._exchange
        start, sent, broken = exchange.start_votes, [], [4, 8] if fails and rank == 1 else []

        def start_votes(vote: Vote) -> Gathering:
            sent.append(trainer.tracker.num_batches)
            if len(sent) in broken:
                raise RuntimeError("no memory")
            return start(vote)

        exchange.start_votes = start_votes  # type: ignore[method-assign]
        for _ in range(4 * NUM_VOTES):
            trainer.step(publisher)
            finish(publisher)
        calls, error = list(sent), str(publisher.error)
        publisher.flush()
        trainer.remember()
        publisher.publish()
        dist.barrier()
        seen = follow(trainer, url)
        publisher.close()
        return {"calls": calls, "cuts": [each.batches for each in seen], "error": error}


def different_arguments(rank: int, world_size: int, url: str) -> dict[str, str]:
    """Ranks with different arguments are refused, before the stream is claimed."""
    trainer = Trainer(rank, world_size)
    fqn = next(iter(trainer.tracker.tables))
    choices: dict[str, list[dict[str, Any]]] = {
        "encoding": [{}, {"encoding": "INT8"}],
        "encoding of a table": [{"encoding": {fqn: Encoding.F16}}, {"encoding": {fqn: "bf16"}}],
        "cadence": [{"cadence": Cadence(batches=2)}, {"cadence": Cadence(batches=3)}],
        "top_k": [{"top_k": TopK(rows=2, score=by_id)}, {"top_k": TopK(rows=3, score=by_id)}],
        "equal": [
            {"encoding": {fqn: "INT8"}, "top_k": TopK(rows=2, score=by_id)},
            {"encoding": {fqn: Encoding.INT8}, "top_k": TopK(rows=2, score=lambda _, rows: -rows.ids.float())},
        ],
    }
    with trainer.tracker:
        return {
            name: attempt(lambda arguments=arguments[rank]: Publisher(trainer.tracker, url, **arguments).close())
            for name, arguments in choices.items()
        }


def by_id(_: str, rows: DeltaRows) -> Tensor:
    return rows.ids.float()


def different_votes(rank: int, world_size: int, url: str) -> str:
    """Ranks with different ``vote_every`` are refused."""
    trainer = Trainer(rank, world_size)
    with trainer.tracker:
        return attempt(lambda: Publisher(trainer.tracker, url, cadence=Cadence(batches=1, vote_every=rank + 1)))


def kept_up(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """Versions are announced, merged and removed during training, and a predictor applies all of them."""
    trainer = Trainer(rank, world_size, is_small=True)
    notifier = LocalNotifier()
    with trainer.tracker:
        publisher = Publisher(
            trainer.tracker,
            url,
            cadence=Cadence(batches=1),
            upkeep=Upkeep(retention=Retention(versions=4, grace_seconds=0.0), compact_every=3),
            notifier=notifier if rank == 0 else None,
        )
        follower = empty_model(trainer.tracker)
        predictor = Predictor(follower, url, name=f"rank-{rank}")
        predictor.follow(60.0 if rank == 0 else 0.005, notifier)
        for _ in range(120):
            trainer.step(publisher)
        publisher.flush()
        log = StreamLog(Storage(url))
        # One pass may have taken longer than all of these batches. Retention is due after 16 versions.
        for _ in range(20):
            trainer.remember()
            last = publisher.publish()
            upkeep = publisher._upkeep
            if rank == 0 and upkeep is not None and upkeep._thread is not None:
                upkeep._thread.join()
        dist.barrier()
        eventually(lambda: predictor.version == last.version)
        predictor.stop()
        trainer.assert_equal(last, follower)
        publisher.close()
        dist.barrier()
        late = empty_model(trainer.tracker)
        assert Predictor(late, url).sync() == last.version
        trainer.assert_equal(last, late)
        beats = read_heartbeats(log.storage)
        return {"versions": log.versions(), "merged": len(log.merged()), "beats": [beat.name for beat in beats]}


def bounds(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """A bound on pending rows or bytes cuts a version on all ranks once one rank reaches it."""
    trainer = Trainer(rank, world_size)
    with trainer.tracker:
        cuts = {}
        for name, cadence in {
            "rows": Cadence(rows=25),
            "num_bytes": Cadence(num_bytes=25 * 32),
            "seconds": Cadence(seconds=1e-6),
            "never": Cadence(rows=10**9),
        }.items():
            publisher = Publisher(trainer.tracker, f"{url}-{name}", cadence=cadence)
            publisher.snapshot()
            for _ in range(20):
                trainer.step(publisher)
                finish(publisher)
            cuts[name] = publisher.version
            publisher.flush()
            pending = trainer.tracker.num_pending()  # does not read, so the reservation does not matter
            publisher.close()
            delta = trainer.tracker.get_delta()
            for fqn, count in pending.items():
                if fqn in trainer.tracker.live.fused_tables:
                    assert count == len(delta[fqn])
        return cuts


def encoded(rank: int, world_size: int, url: str, encoding: str) -> int:
    """A predictor of a quantized stream holds the trainer's rows, encoded and decoded, from snapshots and deltas."""
    trainer = Trainer(rank, world_size, mode=TrackingMode.EMBEDDING)
    with trainer.tracker:
        chosen = Encoding(encoding)
        publisher = Publisher(trainer.tracker, url, encoding=dict.fromkeys(trainer.tracker.tables, chosen))
        held = empty_model(trainer.tracker)
        predictor = Predictor(held, url)
        for number in range(4):
            publisher.snapshot() if number == 2 else publisher.publish()
            predictor.sync()
            for fqn, spec in trainer.tracker.shards.items():
                rows = slice(spec.row_offset, spec.row_offset + spec.num_rows)
                for (first, end), view in zip(spec.columns, trainer.tracker.live.column_views(fqn), strict=True):
                    expected = decode_rows(encode_rows(view, chosen), chosen, end - first, view.dtype)
                    assert torch.equal(held[fqn][rows, first:end], expected), fqn
            dist.barrier()
            trainer.step()
        refused = attempt(lambda: Publisher(trainer.tracker, url))
        assert refused.startswith("ReservedConsumerError: consumer 'default' is reserved by Publisher")
        publisher.close()
        assert attempt(lambda: Publisher(trainer.tracker, url, encoding={"x": chosen})).startswith("InvalidArgument")
        assert attempt(lambda: Publisher(trainer.tracker, url, encoding="INT9")).startswith("InvalidArgument")
        assert attempt(lambda: Publisher(trainer.tracker, url, dense=["dense.nothing"])).startswith(
            "InvalidArgument" if rank == 0 else "RankFailedError"
        )
        top = Publisher(trainer.tracker, url, encoding=chosen, top_k=TopK(rows=3))
        top.publish()
        trainer.step()
        manifest = top.publish()
        assert manifest.num_rows <= 3 * 2  # a row of a column-wise table counts once per column shard
        assert manifest.pending_rows
        top.close()
        return manifest.num_bytes


def refused(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """Unsupported models and arguments are refused by the constructor; the user's consumers are unchanged."""
    trainer = Trainer(rank, world_size, ["a", "a (snapshot)"])
    with trainer.tracker:
        dense = trainer.model.module.dense
        dense.register_buffer("rope", torch.zeros(2, dtype=torch.complex64))
        said = {
            "top_k": attempt(lambda: Publisher(trainer.tracker, url, "a", top_k=TopK(rows=3))),
            "dense": attempt(lambda: Publisher(trainer.tracker, url, "a", dense=dense)),
            "cadence": attempt(lambda: Publisher(trainer.tracker, url, "a", cadence=5)),
        }
        del dense.rope
        publisher = Publisher(trainer.tracker, url, "a")
        said["name taken"] = attempt(publisher.publish)
        assert trainer.tracker.consumers == ("a", "a (snapshot)")
        thread = threading.Thread(target=lambda: said.update(close=attempt(publisher.close)))
        thread.start()
        thread.join()
        publisher.close()
        return said
