"""Cases for misuse of tensors, weights, backward passes and reads by callers; each runs on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import ModelDeltaTracker, TopK, TrackingMode
from delta_tracker.integrations.dcp import SavedTracker
from tests.models import Spec, Table, batch, shard
from tests.publisher.publishing_cases import attempt
from tests.tracker.tracking_cases import _lookups, differing, local_weights, rows_of, spoil, spoiling_score

_TABLE = "ec.embeddings.t"


def spoiled(rank: int, world_size: int, what: str) -> None:
    """Writing to a returned tensor changes nothing inside the tracker."""
    spec = Spec([Table("t", 40, "row"), Table("u", 40, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        start = rows_of(tracker)
        model(batch(spec, generator, size=8)).backward()
        now = rows_of(tracker)
        changed = {fqn: differing(start[fqn], now[fqn]) for fqn in now}
        if what == "score":
            delta = tracker.get_delta(top_k=TopK(rows=3, score=spoiling_score), commit=False)
        else:
            delta = tracker.get_delta(top_k=TopK(rows=3), commit=False)
        assert delta.pending_rows
        sent = {fqn: rows.ids.tolist() for fqn, rows in delta.items()}
        for fqn, rows in delta.items():
            assert torch.equal(rows.states, start[fqn][rows.ids]), "the old rows"
        if what == "left out before":
            spoil(delta)
        tracker.commit(delta)
        if what == "left out after":
            spoil(delta)
        for _ in range(2):
            again = tracker.get_delta(commit=False)
            for fqn, rows in again.items():
                assert rows.ids.tolist() == [row for row in changed[fqn] if row not in sent[fqn]], fqn
                assert rows.known.all()
                assert torch.equal(rows.states, start[fqn][rows.ids]), fqn
            spoil(again)  # no new changes: all of these are carried rows
            tracker.abort(again)


def one_score_buffer(rank: int, world_size: int) -> None:
    """A score may return the same memory for every table."""
    spec = Spec([Table("t", 40, "row"), Table("u", 40, "row")])
    model = shard(spec)
    buffer = torch.empty(40)

    def score(fqn: str, rows: Any) -> Tensor:
        return buffer[: len(rows)].fill_(1.0 if fqn == _TABLE else 2.0)

    with ModelDeltaTracker(model) as tracker:
        model(batch(spec, torch.Generator().manual_seed(rank), size=8)).backward()
        every = {fqn: len(rows) for fqn, rows in tracker.get_delta(commit=False).items()}
        num_best = every["ec.embeddings.u"]
        delta = tracker.get_delta(top_k=TopK(rows=num_best, score=score))
        assert {fqn: len(rows) for fqn, rows in delta.items()} == {_TABLE: 0, "ec.embeddings.u": num_best}


def live_counter(rank: int, world_size: int) -> None:
    """A saved state does not change when a counter whose state_dict returns its live tensors counts further."""

    class Live:
        def __init__(self) -> None:
            self.count = torch.zeros(1)

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def merge(self, states: Any) -> dict[str, Any]:
            return {"count": sum((state["count"] for state in states), torch.zeros(1))}

        def load_state_dict(self, state: Any) -> None:
            self.count = state["count"]

    with ModelDeltaTracker(shard(Spec([Table("t", 40, "row")]))) as tracker:
        counter = Live()
        tracker.register_counter("live", counter)
        counter.count += 3
        saved = tracker.state_dict()
        counter.count += 5
        tracker.load_state_dict(saved)
        assert counter.count.tolist() == [3]


def narrow_ids(rank: int, world_size: int, dtype: str) -> int:
    """Writing to ids before the backward loses no row, also if the kernel kept a copy in another dtype."""
    spec = Spec([Table("t", 40, "table:0")])
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        start = rows_of(tracker)
        ids = torch.tensor([7, 30], dtype=getattr(torch, dtype))
        loss = model(KeyedJaggedTensor(keys=["t"], values=ids, lengths=torch.tensor([2])))
        ids.data.fill_(3)
        loss.backward()
        written = differing(start[_TABLE], tracker.read_rows(_TABLE))
        assert tracker.get_delta_ids()[_TABLE].tolist() == written
        return len(written)


def _saves(model: Any, path: str) -> Callable[[], None]:
    """Save the model; return a function that loads it in place."""
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return lambda: dcp.load({"model": model.state_dict()}, checkpoint_id=path)


def written_in_place(  # noqa: C901
    rank: int, world_size: int, how: str, spec: dict[str, Any], mode: str, path: str
) -> dict[str, int]:
    """Write to weights in place: every changed row is in the next delta, with a correct old row or without one."""
    made = Spec.every_sharding(world_size, **spec)
    model = shard(made)
    generator = torch.Generator().manual_seed(rank)
    counts = dict.fromkeys(("edited", "later"), 0)
    with ModelDeltaTracker(model, ["a", "b"], mode=TrackingMode(mode)) as tracker:
        write: Callable[[], object] = _saves(model, path) if how == "dcp.load" else lambda: None
        model(batch(made, generator)).backward()
        tracker.get_delta("a")
        copies = {name: rows_of(tracker) for name in ("a", "b")}
        tracker.get_delta("b")
        for number in range(3):
            model(batch(made, generator)).backward()
            if number:
                tracker.step()
            before = rows_of(tracker)
            if how == "dcp.load":
                write()
            else:
                with torch.no_grad():
                    for local in local_weights(model):
                        if how == "shard":
                            local[number].add_(1.0)
                        elif how == "index":
                            local[local.shape[0] - 1] = number
            edited = rows_of(tracker)
            counts["edited"] += sum(len(differing(before[fqn], edited[fqn])) for fqn in edited)
            if number != 1:
                model(batch(made, generator)).backward()  # it captures rows that are already edited
            for name in ("a", "b") if number else ("a",):
                assert sum(tracker.num_pending(name).values()) > 0
                delta = tracker.get_delta(name, with_values=True)
                for fqn, now in rows_of(tracker).items():
                    rows = delta[fqn]
                    assert set(differing(copies[name][fqn], now)) <= set(rows.ids.tolist()), (name, fqn)
                    if mode == "embedding" and len(rows):
                        known = rows.ids[rows.known]
                        assert torch.equal(rows.states[rows.known], copies[name][fqn][known]), (name, fqn)
                    if now.numel():
                        copies[name][fqn][rows.ids] = rows.values
                        assert torch.equal(copies[name][fqn], now), (name, fqn)
                counts["later"] += tracker.get_delta(name).num_rows
        assert tracker.num_hook_errors == 0
    return counts


def nothing_written(rank: int, world_size: int, spec: dict[str, Any]) -> None:
    """Training, evaluation, reads, saving and flushing do not count as in-place writes."""
    made = Spec.every_sharding(world_size, **spec)
    model = shard(made)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        for _ in range(3):
            start = rows_of(tracker)
            model(batch(made, generator)).backward()
            model.eval()
            with torch.no_grad():
                model(batch(made, generator))
            model.train()
            model.state_dict()
            tracker.state_dict()
            for lookup in model.module.ec._lookups:
                lookup.flush()
            tracker.step()
            delta = tracker.get_delta(with_values=True, with_optimizer=True)
            for fqn, now in rows_of(tracker).items():
                assert delta[fqn].ids.tolist() == differing(start[fqn], now), fqn


def restored_in_place(rank: int, world_size: int, path: str) -> None:
    """After loading a model in place and then its tracker, exactly the saved rows are pending."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, ["a", "b"], mode=TrackingMode.EMBEDDING) as tracker:
        model(batch(spec, generator)).backward()
        tracker.get_delta("a")
        model(batch(spec, generator)).backward()
        dcp.save({"model": model.state_dict(), "tracker": tracker}, checkpoint_id=path)
        saved = {name: tracker.num_pending(name) for name in ("a", "b")}
        model(batch(spec, generator)).backward()
        dcp.load({"model": model.state_dict(), "tracker": SavedTracker(tracker, path)}, checkpoint_id=path)
        assert {name: tracker.num_pending(name) for name in ("a", "b")} == saved
        for name in ("a", "b"):
            assert {fqn: len(rows) for fqn, rows in tracker.get_delta(name).items()} == saved[name]
            assert tracker.get_delta(name).num_rows == 0


def _fail(model: Any, features: KeyedJaggedTensor, how: str) -> None:
    """Run a backward pass that raises before or after the looked-up rows are written."""
    loss = model(features)
    if how == "ids":
        features.values().add_(0)  # modifies a tensor that the kernel saved, so its node raises before it writes
    else:

        def raise_error(*_: object) -> None:
            raise RuntimeError("a hook of the user's")

        for node in _lookups(loss.grad_fn):
            (node.register_prehook if how == "before" else node.register_hook)(raise_error)
    try:
        loss.backward()
    except RuntimeError:
        return
    raise AssertionError("nothing was raised")


def failed_backwards(rank: int, world_size: int, how: str, num_failures: int) -> dict[str, int]:
    """Rows of a backward that raised are in exactly one more delta."""
    spec = Spec([Table("t", 1000, "table:0"), Table("u", 30, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    counts = {}
    with ModelDeltaTracker(model, ["a", "b"], mode=TrackingMode.EMBEDDING) as tracker:
        start = rows_of(tracker)
        for _ in range(num_failures):
            _fail(model, batch(spec, generator), how)
        for name in ("a", "b"):
            delta = tracker.get_delta(name, with_values=True)
            for fqn, now in rows_of(tracker).items():
                assert set(differing(start[fqn], now)) <= set(delta[fqn].ids.tolist()), fqn
                assert torch.equal(delta[fqn].values, now[delta[fqn].ids])
                assert torch.equal(delta[fqn].states, start[fqn][delta[fqn].ids])
            counts["first"] = delta.num_rows
        for name in ("a", "b"):
            counts["second"] = tracker.get_delta(name).num_rows
        counts["bytes"] = tracker.memory().log_bytes
        assert tracker.num_hook_errors == 0
    return counts


def failed_reads(rank: int, world_size: int, how: str) -> dict[str, int]:
    """Reads that raise leave the log unchanged and the previous uncommitted read valid."""
    spec = Spec([Table("t", 20_000, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)

    def score(_: str, rows: Any) -> Tensor:
        if how == "other rank" and rank:
            return torch.ones(len(rows))
        if how == "raises":
            raise MemoryError
        return torch.full((len(rows),), torch.nan)

    counts = {}
    with ModelDeltaTracker(model, ["a", "b"], mode=TrackingMode.EMBEDDING, max_bytes=100_000) as tracker:
        for _ in range(3):
            model(batch(spec, generator, size=50)).backward()
        held = tracker.get_delta("a", commit=False)
        model(batch(spec, generator, size=50)).backward()
        tracker.compact()
        counts["before"] = tracker.memory().log_bytes
        for number in range(60):
            try:
                tracker.get_delta("ab"[number % 2], top_k=TopK(rows=2, score=score))
            except (MemoryError, ValueError):
                pass
            else:
                raise AssertionError("nothing was raised")
            model(batch(spec, generator, size=2)).backward()
            tracker.step()
        counts["after"] = tracker.memory().log_bytes
        tracker.commit(held)
        assert not tracker.needs_snapshot("a")
        assert attempt(lambda: tracker.commit(held)).startswith("StaleDeltaError")
        counts["a"], counts["b"] = (tracker.get_delta(name).num_rows for name in ("a", "b"))
        counts["held"] = held.num_rows
    return counts
