"""Cases for tracking modes, other kernels, consumers and top-k on real sharded models; each runs on every rank."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import distributed as dist
from torchrec import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, TopK, TrackingMode
from tests.models import Spec, Table, batch, kernels_of, ordinary_optimizer, shard
from tests.publisher.publishing_cases import attempt
from tests.tracker.tracking_cases import differing, rows_of


def dense(rank: int, world_size: int, optimizer: str, arguments: dict[str, float], mode: str) -> dict[str, int]:
    """Deltas of DATA_PARALLEL and DENSE tables have every row that an ordinary optimizer changes on any rank."""
    spec = Spec(
        [
            Table("replicated", 12, "data"),
            Table("dense_row", 13, "row", kernel="dense"),
            Table("dense_table", 7, f"table:{world_size - 1}", kernel="dense"),
            Table("dense_column", 9, f"column:0,{world_size - 1}", kernel="dense"),
            Table("fused", 11, "row"),
        ],
        bag=True,
    )
    model = shard(spec)
    ordinary = ordinary_optimizer(model, optimizer, **arguments)
    generator = torch.Generator().manual_seed(rank)
    counts = {"moved": 0, "looked up": 0}
    with ModelDeltaTracker(model, mode=TrackingMode(mode)) as tracker:
        copies = rows_of(tracker)
        for number in range(6):
            features = batch(spec, generator)
            loss = model(features)
            ordinary.zero_grad()
            loss.backward()
            if number % 2:
                tracker.get_delta(commit=False)  # between backward and optimizer.step()
            ordinary.step()
            delta = tracker.get_delta(with_values=True)
            for fqn, now in rows_of(tracker).items():
                assert delta[fqn].ids.tolist() == differing(copies[fqn], now), fqn
                if mode == "embedding":
                    assert delta[fqn].known.all()
                    assert torch.equal(delta[fqn].states, copies[fqn][delta[fqn].ids]), fqn
                if now.numel():
                    copies[fqn][delta[fqn].ids] = delta[fqn].values
                    assert torch.equal(copies[fqn], now)
            counts["moved"] += len(delta["ec.embedding_bags.replicated"])
            counts["looked up"] += len(set(features["replicated"].values().tolist()))
        assert tracker.memory().copy_bytes > 0
    return counts


def first_seen(rank: int, world_size: int, seed: int, bag: bool) -> int:
    """In mode EMBEDDING the old state of a row is the state that the consumer last received."""
    spec = Spec.every_sharding(world_size, bag=bag)
    model = shard(spec)
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed * 10 + rank)
    names = ["a", "b"]
    num_rows = 0
    with ModelDeltaTracker(model, names, mode=TrackingMode.EMBEDDING) as tracker:
        copies = {name: rows_of(tracker) for name in names}
        for _ in range(15):
            for _ in range(draw.randrange(3)):
                model(batch(spec, generator)).backward()
            name, commits = draw.choice(names), draw.random() < 0.7
            with_states = draw.random() < 0.7
            delta = tracker.get_delta(name, with_values=True, with_states=with_states, commit=commits)
            for fqn, rows in delta.items():
                if not rows.shard.num_rows:
                    continue
                if with_states:
                    assert rows.known.all()
                    assert torch.equal(rows.states, copies[name][fqn][rows.ids]), fqn
                    assert rows.states.grad_fn is None
                else:
                    assert rows.states is rows.known is None
                num_rows += len(rows)
                if commits:
                    copies[name][fqn][rows.ids] = rows.values
        assert tracker.num_hook_errors == 0
    return num_rows


def momentum(rank: int, world_size: int, mode: str, optimizer: str) -> str:
    """Old optimizer states belong to the right rows, for every table of a fused group."""
    spec = Spec.every_sharding(world_size, optimizer=optimizer)
    model = shard(spec)
    refused = attempt(lambda: ModelDeltaTracker(model, mode=TrackingMode(mode)).detach())
    if refused != "nothing was raised":
        return refused
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, mode=TrackingMode(mode)) as tracker:
        for _ in range(4):
            before = _sums(model)
            for _ in range(2):
                model(batch(spec, generator)).backward()
            after = _sums(model)
            delta = tracker.get_delta(with_optimizer=True)
            for fqn, rows in delta.items():
                if not rows.shard.num_rows:
                    continue
                old, now = (
                    torch.cat([each[fqn, first] for first, _ in rows.shard.columns], dim=1) for each in (before, after)
                )
                assert torch.equal(rows.optimizer[0], now[rows.ids]), fqn
                if mode == "momentum_last":
                    expected = now[rows.ids].norm(dim=1)
                else:
                    expected = (now - old)[rows.ids].sum(dim=1)
                    assert (expected > 0).all()
                torch.testing.assert_close(rows.states, expected)
        assert tracker.num_hook_errors == 0
    return "right"


def _sums(model: Any) -> dict[tuple[str, int], torch.Tensor]:
    """Return the optimizer's first state ``[R, ...]`` by FQN and first column, located by the kernels' configs."""
    found = {}
    for kernel in kernels_of(model.module.ec):
        for config, states in zip(
            kernel.config.embedding_tables, kernel.emb_module.split_optimizer_states(), strict=True
        ):
            key = f"ec.embeddings.{config.name}", config.local_metadata.shard_offsets[1]
            found[key] = states[0].detach().clone().reshape(states[0].shape[0], -1)
    return found


def top_k(rank: int, world_size: int, budget: dict[str, Any], mode: str) -> dict[str, Any]:  # noqa: C901
    """Rows left out stay pending with their old value until they are sent; at the end no row is missing."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    chosen = TopK(**budget)
    counts: dict[str, Any] = {"sent": [], "left": [], "ages": 0}
    with ModelDeltaTracker(model, mode=TrackingMode(mode)) as tracker:
        copies = rows_of(tracker)
        for number in range(8):
            model(batch(spec, generator)).backward()
            with_states = number % 4 != 1
            delta = tracker.get_delta(top_k=chosen, with_values=True, with_states=with_states, commit=False)
            worst_sent, best_left = torch.inf, -torch.inf
            for fqn, now in rows_of(tracker).items():
                rows, left = delta[fqn], delta.left_out.get(fqn)
                left_ids = [] if left is None else left.ids.tolist()
                assert rows.ids.tolist() == sorted(rows.ids.tolist())
                assert sorted(rows.ids.tolist() + left_ids) == differing(copies[fqn], now), fqn
                if now.numel() and mode == "embedding":
                    assert torch.equal(rows.states, copies[fqn][rows.ids]) if with_states else rows.states is None
                    moved = (now - copies[fqn]).norm(dim=1)
                    worst_sent = min([worst_sent, *moved[rows.ids].tolist()])
                    best_left = max([best_left, *moved[left_ids].tolist()])
                    if left is not None:
                        assert torch.equal(left.states, copies[fqn][left.ids]), "left with its old value"
                if chosen.max_age is not None and left is not None and left.ages is not None:
                    assert (left.ages < chosen.max_age).all()
                    counts["ages"] = max(counts["ages"], *left.ages.tolist(), 0)
            if mode == "embedding" and not chosen.per_table and chosen.max_age is None:
                limits = torch.tensor([[worst_sent, best_left]])
                every = [torch.empty_like(limits) for _ in range(world_size)]
                dist.all_gather(every, limits)
                assert torch.stack(every)[..., 0].min() >= torch.stack(every)[..., 1].max() - 1e-6
            counts["sent"].append(delta.num_rows)
            counts["left"].append(delta.pending_rows)
            if len(counts["sent"]) == 3:
                tracker.abort(delta)
                continue
            tracker.commit(delta)
            for fqn, rows in delta.items():
                if copies[fqn].numel():
                    copies[fqn][rows.ids] = rows.values
        rest = tracker.get_delta(with_values=True)
        for fqn, now in rows_of(tracker).items():
            if now.numel():
                copies[fqn][rest[fqn].ids] = rest[fqn].values
                assert torch.equal(copies[fqn], now), fqn
        assert tracker.memory().carried_bytes == 0
    return counts


def top_k_of_replicated(rank: int, world_size: int) -> list[int]:
    """Top-k selects from a replicated table on rank 0; the other ranks' deltas have all of its rows."""
    spec = Spec([Table("replicated", 12, "data")], bag=True)
    model = shard(spec)
    ordinary = ordinary_optimizer(model, "SGD", lr=0.1)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        model(batch(spec, torch.Generator().manual_seed(rank), size=6)).backward()
        ordinary.step()
        delta = tracker.get_delta(top_k=TopK(rows=2))
        return [delta.num_rows, delta.pending_rows]


def unknown_first(rank: int, world_size: int) -> None:
    """Rows without a known old value are selected first, and are marked as such."""
    spec = Spec([Table("t", 30, "row")])
    model = shard(spec)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        model(batch(spec, torch.Generator().manual_seed(rank), size=10)).backward()
        looked_up = set(tracker.get_delta(commit=False)["ec.embeddings.t"].ids.tolist())
        unseen = sorted(set(range(15)) - looked_up)[:2]
        tracker.mark_changed("ec.embeddings.t", torch.tensor(unseen))
        delta = tracker.get_delta(top_k=TopK(rows=2 * world_size))
        rows = delta["ec.embeddings.t"]
        assert rows.ids.tolist() == unseen
        assert not rows.known.any()
        assert rows.states.isnan().all()
        rest = tracker.get_delta()["ec.embeddings.t"]
        assert set(rest.ids.tolist()) == looked_up
        assert rest.known.all()


def refused_top_k(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors for invalid top-k reads; they change nothing."""
    spec = Spec([Table("t", 30, "row")])
    model = shard(spec)

    def broken(fqn: str, rows: Any) -> torch.Tensor:
        scores = torch.ones(len(rows))
        if rank == 0:
            scores[:1] = torch.nan
        return scores

    with ModelDeltaTracker(model) as tracker:
        model(batch(spec, torch.Generator().manual_seed(rank), size=10)).backward()
        num_rows = tracker.get_delta(commit=False).num_rows
        messages = {
            "no score": attempt(lambda: tracker.get_delta(top_k=TopK(rows=1))),
            "nan": attempt(lambda: tracker.get_delta(top_k=TopK(rows=1, score=broken))),
            "outside": attempt(lambda: tracker.mark_changed("ec.embeddings.t", torch.tensor([0, 15, -1]))),
            "floats": attempt(lambda: tracker.mark_changed("ec.embeddings.t", torch.tensor([0.5]))),
            "table": attempt(lambda: tracker.mark_changed("t")),
            "consumer": attempt(lambda: tracker.add_consumer("default")),
            "remove": attempt(lambda: tracker.remove_consumer("x")),
            "clear": attempt(lambda: tracker.clear("x")),
            "engine": attempt(lambda: ModelDeltaTracker(model, engine="cuda")),
            "record": attempt(lambda: ModelDeltaTracker(model, record="all")),
        }
        own = tracker.get_delta(top_k=TopK(rows=1, score=lambda fqn, rows: rows.values.norm(dim=1)))
        assert own.num_rows + own.pending_rows == num_rows
        return messages


def lookups(rank: int, world_size: int, mode: str) -> None:
    """``record="lookups"`` also records evaluation, with the weights before the forward, and loses no update."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, record="lookups", mode=TrackingMode(mode)) as tracker:
        before = rows_of(tracker)
        with torch.no_grad():
            model(batch(spec, generator))
        seen = tracker.get_delta()
        assert sum(len(rows) for rows in seen.values())
        loss = model(batch(spec, generator))
        read = tracker.get_delta()
        loss.backward()
        late = tracker.get_delta()
        for fqn, now in rows_of(tracker).items():
            assert set(differing(before[fqn], now)) <= set(late[fqn].ids.tolist()), "a read in between loses nothing"
            assert set(late[fqn].ids.tolist()) <= set(read[fqn].ids.tolist())
            if mode == "embedding" and now.numel():
                assert torch.equal(read[fqn].states, before[fqn][read[fqn].ids])


def consumers(rank: int, world_size: int) -> None:
    """Add, remove and clear consumers."""
    spec = Spec([Table("t", 300, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)

    def train() -> None:
        model(batch(spec, generator, size=6)).backward()

    with ModelDeltaTracker(model, ["a", "b"]) as tracker:
        train()
        tracker.add_consumer("c")
        assert tracker.get_delta("c").num_rows == 0
        train()
        both, late = tracker.get_delta("a", commit=False).num_rows, tracker.get_delta("c", commit=False).num_rows
        assert both > late > 0
        tracker.clear("a")
        assert tracker.get_delta("a").num_rows == 0
        assert tracker.get_delta("b", commit=False).num_rows == both
        tracker.remove_consumer("b")
        assert tracker.consumers == ("a", "c")
        tracker.clear()
        assert tracker.get_delta("c").num_rows == tracker.get_delta("a").num_rows == 0
        assert tracker.memory().total_bytes == 0
        train()
        assert tracker.get_delta("a").num_rows > 0
        tracker.remove_consumer("a")
        tracker.remove_consumer("c")
        train()
        tracker.compact()
        assert tracker.memory().total_bytes == 0
        tracker.add_consumer("d")
        train()
        assert tracker.get_delta().num_rows > 0


def recorded_by_hand(rank: int, world_size: int) -> None:
    """The seed interface's recorders count a feature for every table in which it is looked up."""
    spec = Spec([Table("t", 30, "table:0"), Table("u", 30, "table:0", features=("t",))])
    model = shard(spec)
    features = batch(spec, torch.Generator().manual_seed(1), size=6)
    expected = sorted(set(features["t"].values().tolist())) if rank == 0 else []
    with ModelDeltaTracker(model) as tracker:
        tracker.record_lookup(features, torch.empty(0))
        tracker.trigger_compaction()
        assert {fqn: ids.tolist() for fqn, ids in tracker.get_delta_ids().items()} == dict.fromkeys(
            tracker.tables, expected
        )
        assert "EMBEDDING" in attempt(lambda: tracker.record_embeddings(features, torch.empty(0)))
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        rows = torch.arange(len(features.values()) * 8.0).reshape(-1, 8)
        tracker.record_lookup(features, rows)
        delta = tracker.get_delta()
        for changed in delta.values():
            for row, state in zip(changed.ids.tolist(), changed.states, strict=True):
                assert torch.equal(state, rows[features.values().tolist().index(row)])
        wrong = torch.zeros(len(features.values()), 5)
        said = attempt(lambda: tracker.record_embeddings(features, wrong))
        assert ("rows of 8 columns" in said) == (rank == 0)
        assert tracker.get_delta().num_rows == 0
        assert "embeddings=(3,)" in attempt(lambda: tracker.record_embeddings(features, torch.empty(3)))
    with ModelDeltaTracker(model) as tracker:
        unknown = KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1]))
        assert "features=['x']" in attempt(lambda: tracker.record_ids(unknown))
        outside = KeyedJaggedTensor(["t"], torch.tensor([1, 30, -1]), lengths=torch.tensor([3]))
        assert ("ids=[30, -1]" in attempt(lambda: tracker.record_ids(outside))) == (rank == 0)
        assert tracker.get_delta().num_rows == 0


def slow_consumer(rank: int, world_size: int) -> str:
    """A lagging consumer is dropped, its read raises, and it recovers with a snapshot."""
    spec = Spec([Table("t", 200, "row", dim=64)])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, ["fast", "slow"], mode=TrackingMode.EMBEDDING, max_bytes=20_000) as tracker:
        for _ in range(30):
            model(batch(spec, generator, size=10)).backward()
            tracker.step()
            assert tracker.memory().total_bytes <= 20_000
            assert tracker.get_delta("fast").num_rows
        message = attempt(lambda: tracker.get_delta("slow"))
        tracker.clear("slow")
        copy = tracker.read_rows("ec.embeddings.t")
        model(batch(spec, generator, size=10)).backward()
        rows = tracker.get_delta("slow", with_values=True)["ec.embeddings.t"]
        copy[rows.ids] = rows.values
        assert torch.equal(copy, tracker.read_rows("ec.embeddings.t"))
        return message
