"""Cases for a tracker on a real sharded model; each runs on every rank."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from delta_tracker import Delta, DeltaRows, ModelDeltaTracker, TopK, TrackingMode
from delta_tracker.buffers import MEMORY
from delta_tracker.buffers.cuda_fence import StreamFence
from delta_tracker.errors import DeltaTrackerError, InvalidArgumentError
from delta_tracker.tracker.log_writes import LogWrites
from delta_tracker.tracker.store.segments import SegmentStore
from tests.models import Spec, Table, batch, kernels_of, shard, with_kernel


class _OtherEmbedding(nn.Module):
    """Module that is no table, whose name suggests one."""


def rows_of(tracker: ModelDeltaTracker) -> dict[str, torch.Tensor]:
    return {fqn: tracker.read_rows(fqn) for fqn in tracker.tables}


def differing(before: torch.Tensor, now: torch.Tensor) -> list[int]:
    return (now != before).any(dim=1).nonzero().flatten().tolist() if now.numel() else []


def exact(rank: int, world_size: int, spec: dict[str, Any]) -> dict[str, int]:
    """Every delta holds exactly the rows whose bytes changed, with their values."""
    model_spec = Spec.every_sharding(world_size, **spec)
    model = shard(model_spec)
    num_rows = dict.fromkeys(("changed", "read"), 0)
    with ModelDeltaTracker(model) as tracker:
        generator = torch.Generator().manual_seed(rank)
        for number in range(6):
            before = rows_of(tracker)
            model(batch(model_spec, generator)).backward()
            tracker.step()
            delta = tracker.get_delta(with_values=True)
            assert delta.batches == (number, number + 1)
            assert list(delta) == list(tracker.tables)
            for fqn, now in rows_of(tracker).items():
                changed = delta[fqn]
                assert changed.ids.dtype == torch.int64
                assert changed.ids.tolist() == differing(before[fqn], now), fqn
                assert torch.equal(changed.values, now[changed.ids]), fqn
                assert changed.values.dtype == tracker.tables[fqn].dtype
                assert torch.equal(changed.global_ids, changed.ids + tracker.shards[fqn].row_offset)
                num_rows["changed"] += len(differing(before[fqn], now))
                num_rows["read"] += len(changed)
        assert tracker.get_delta().num_rows == 0
        assert tracker.num_hook_errors == 0
    return num_rows


def spoil(delta: Delta) -> None:
    """Write garbage into every tensor of a delta."""
    for rows in (*delta.values(), *delta.left_out.values()):
        for tensor in (rows.ids, rows.states, rows.known, getattr(rows, "ages", None), getattr(rows, "values", None)):
            if tensor is not None:
                tensor.zero_() if tensor.dtype == torch.bool else tensor.fill_(-7)


def spoiling_score(_: str, rows: DeltaRows) -> torch.Tensor:
    """Return how far rows moved, computed in place in tensors that then hold garbage."""
    assert rows.values is not None
    moved = rows.values.norm(dim=1) if rows.states is None else rows.values.sub_(rows.states).norm(dim=1)
    for tensor in (rows.ids, rows.states, rows.values):
        if tensor is not None:
            tensor.fill_(-7)
    return moved.nan_to_num_(1e9)


def local_weights(model: Any) -> list[torch.Tensor]:
    """Return the first local shard of every sharded table in the model's state dict."""
    shards = [value.local_shards() for value in model.state_dict().values() if hasattr(value, "local_shards")]
    return [local[0].tensor for local in shards if local]


def fail_backward(model: Any, features: KeyedJaggedTensor, *, bag: bool) -> None:
    """Run a backward pass that raises at the node of each lookup, before it writes."""
    looked_up = model.module.ec(features)  # without the dense layer: DDP does not survive a pass that raises
    loss = looked_up.values().sum() if bag else sum(each.values().sum() for each in looked_up.values())

    def raise_error(*_: object) -> None:
        raise RuntimeError("a hook of the user's")

    for handle in [node.register_prehook(raise_error) for node in _lookups(loss.grad_fn)]:
        try:
            loss.backward(retain_graph=True)
        except RuntimeError:
            pass
        else:
            raise AssertionError("nothing was raised")
        handle.remove()


def _lookups(node: Any) -> list[Any]:
    """Return the autograd nodes of the kernels behind a node."""
    if node is None:
        return []
    if "LookupFunction" in node.name():
        return [node]
    return list(dict.fromkeys(found for upstream, _ in node.next_functions for found in _lookups(upstream)))


class _Copy:
    """A consumer's copy of the rows, which applies every committed read and overwrites the returned tensors."""

    def __init__(self, tracker: ModelDeltaTracker, name: str) -> None:
        self.tracker, self.name = tracker, name
        self.rows = rows_of(tracker)
        self.open: Any = None
        self.allowed: dict[str, set[int]] = {fqn: set() for fqn in tracker.tables}

    def read(self, extra: dict[str, set[int]], top_k: TopK | None = None) -> None:
        """Read without committing; every row that differs must be in it, and other rows only with a reason."""
        delta = self.tracker.get_delta(self.name, commit=False, with_values=True, top_k=top_k)
        left = {fqn: set(rows.ids.tolist()) for fqn, rows in delta.left_out.items()}
        for fqn, now in rows_of(self.tracker).items():
            rows = delta[fqn]
            needed, found = set(differing(self.rows[fqn], now)), set(rows.ids.tolist()) | left.get(fqn, set())
            assert needed <= found, (fqn, needed, found)
            assert found <= needed | self.allowed[fqn] | extra[fqn], (fqn, found, needed, self.allowed[fqn])
            if rows.states is not None and len(rows):
                assert torch.equal(rows.states[rows.known], self.rows[fqn][rows.ids[rows.known]]), fqn
        taken = {fqn: (rows.ids.clone(), rows.values.clone()) for fqn, rows in delta.items() if len(rows)}
        spoil(delta)
        self.open = delta, taken, {fqn: set(rows) | left.get(fqn, set()) for fqn, rows in extra.items()}

    def fail_read(self, failing_rank: int) -> None:
        """Run a read that raises on every rank, because a score has a wrong shape on one rank."""

        def score(_: str, rows: DeltaRows) -> torch.Tensor:
            return torch.ones(len(rows) + (dist.get_rank() == failing_rank % dist.get_world_size()))

        try:
            self.tracker.get_delta(self.name, top_k=TopK(rows=1, score=score))
        except InvalidArgumentError:
            return
        raise AssertionError("nothing was raised")

    def allow_all(self) -> None:
        """Allow any row in the next read."""
        self.allowed = {fqn: set(range(len(rows))) for fqn, rows in self.rows.items()}

    def commit(self) -> None:
        delta, taken, extra = self.open
        self.tracker.commit(delta)
        for fqn, (ids, values) in taken.items():
            self.rows[fqn][ids] = values
        # Rows that were open at this cut may come again; any other row must change first.
        self.allowed, self.open = extra, None

    def abort(self) -> None:
        self.tracker.abort(self.open[0])
        self.open = None


def schedule(  # noqa: C901, PLR0912, PLR0915  one branch for each event
    rank: int, world_size: int, seed: int, num_events: int, bag: bool
) -> dict[str, int]:
    """Run forward, backward, eval, drop, step, read, commit and abort in random order, with reads inside the backward.

    The events include passes that raise, in-place writes to weights, reads that raise, and scores that work in place.
    """
    spec = Spec.every_sharding(world_size, bag=bag)
    model = shard(spec)
    draw = random.Random(seed)  # the same events on every rank, because some are collective
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    names = ["a", "b"]
    counts = dict.fromkeys(("reads between", "reads inside", "backwards"), 0)
    mode = TrackingMode.EMBEDDING if seed // 2 % 2 else TrackingMode.ID_ONLY
    events = {
        "forward": 2, "backward": 2, "backward inside": 2, "eval": 1, "drop": 1, "step": 1, "read": 2, "abort": 1,
        "top-k": 1, "raise": 0.5, "overwrite": 0.2, "fail read": 0.3,
    }  # fmt: skip
    begin_write, is_reading_inside = LogWrites.begin_write, False

    def read_when_it_begins(log: LogWrites, key: int, ids: Any) -> None:
        nonlocal is_reading_inside
        begin_write(log, key, ids)
        if not is_reading_inside:
            return
        is_reading_inside = False  # once per backward
        counts["reads inside"] += 1
        extra = {fqn: set(ids[fqn].tolist()) if fqn in ids else set() for fqn in tracker.tables}
        copies["b"].read(extra)
        copies["b"].commit()

    built = ModelDeltaTracker(model, names, auto_compact=bool(seed % 2), mode=mode)
    with built as tracker, mock.patch.object(LogWrites, "begin_write", read_when_it_begins):
        copies = {name: _Copy(tracker, name) for name in names}
        nothing: dict[str, set[int]] = {fqn: set() for fqn in tracker.tables}
        pending: list[torch.Tensor] = []
        for _ in range(num_events):
            (event,) = draw.choices(list(events), list(events.values()))
            name = draw.choice(names)
            inside = draw.random() < 0.5
            if event == "forward" and len(pending) < 3:
                pending.append(model(batch(spec, generator)))
            elif event.startswith("backward") and pending:
                loss = pending.pop(draw.randrange(len(pending)))
                is_reading_inside = event == "backward inside"
                loss.backward(retain_graph=inside)
                if inside:
                    loss.backward()
                is_reading_inside = False
                counts["backwards"] += 1
            elif event == "eval":
                with torch.no_grad():
                    model(batch(spec, generator))
            elif event == "drop" and pending:
                pending.pop()
            elif event == "step":
                tracker.step()
            elif event in ("read", "abort"):
                counts["reads between"] += 1
                copies[name].read(nothing)
                if draw.random() < 0.2:
                    copies[name].fail_read(draw.randrange(2))
                getattr(copies[name], "commit" if event == "read" else "abort")()
            elif event == "top-k":
                copies[name].read(nothing, TopK(rows=draw.randrange(1, 9), score=spoiling_score))
                copies[name].commit()
                copies[name].read(nothing)  # of carried rows alone
                copies[name].abort()
            elif event == "fail read":
                copies[name].fail_read(draw.randrange(2))
            elif event == "raise" and world_size == 1:  # the other ranks would wait in a collective
                fail_backward(model, batch(spec, generator), bag=bag)
                for copy in copies.values():
                    copy.allow_all()
            elif event == "overwrite":
                pending.clear()  # torch refuses the backward of a lookup whose weights were written to
                row = draw.randrange(3)
                with torch.no_grad():
                    for weight in local_weights(model):
                        weight[row] += 1.0
                for copy in copies.values():
                    copy.allow_all()
        for copy in copies.values():
            copy.read(nothing)
            copy.commit()
            for fqn, now in rows_of(tracker).items():
                assert torch.equal(copy.rows[fqn], now), fqn
        assert tracker.num_hook_errors == 0
    return counts


def passes_that_update_nothing(rank: int, world_size: int) -> None:
    """Evaluation, no_grad and a dropped output mark no rows; a second backward marks them again."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        with torch.no_grad():
            model(batch(spec, generator))
        model.eval()
        with torch.no_grad():
            model(batch(spec, generator))
        model.train()
        model(batch(spec, generator))  # dropped
        assert tracker.get_delta().num_rows == 0
        loss = model(batch(spec, generator))
        assert tracker.get_delta().num_rows == 0
        loss.backward(retain_graph=True)
        first = tracker.get_delta_ids()
        loss.backward()
        second = tracker.get_delta_ids()
        assert sum(map(len, first.values()))
        assert all(torch.equal(first[fqn], second[fqn]) for fqn in first)


def out_of_range_ids(rank: int, world_size: int) -> None:
    """FBGEMM updates row 0 for an id outside the table, so row 0 is what changed."""
    spec = Spec([Table("t", 5, "table:0")])
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        before = rows_of(tracker)
        ids = torch.tensor([3, 99]) if rank == 0 else torch.tensor([3])
        model(KeyedJaggedTensor(keys=["t"], values=ids, lengths=torch.tensor([len(ids)]))).backward()
        (fqn,) = tracker.tables
        changed = differing(before[fqn], tracker.read_rows(fqn))
        assert tracker.get_delta_ids()[fqn].tolist() == changed
        assert changed == ([0, 3] if rank == 0 else [])


def failing_hook(rank: int, world_size: int) -> int:
    """Fail inside a hook: training continues, and every row of the table becomes pending."""
    spec = Spec([Table("t", 5, "table:0")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        for hook in tracker._hooks.registered:

            def broken(features: object) -> object:
                raise RuntimeError("boom")

            hook._ids_by_table = broken
        for _ in range(2):
            model(batch(spec, generator, max_length=3)).backward()
        (ids,) = tracker.get_delta_ids().values()
        assert ids.tolist() == (list(range(5)) if rank == 0 else [])
        assert tracker.get_delta().num_rows == 0, "the writes were proven, so nothing stays open"
        return tracker.num_hook_errors


def failing_end(rank: int, world_size: int, fails: str) -> list[list[int]]:
    """Fail once while a written batch is closed: one read returns all rows, later ones those of their batch."""
    owner = {"end_write": SegmentStore, "leave": StreamFence}[fails]
    method = getattr(owner, fails)
    num_left = 1

    def fail_once(*args: Any) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise MemoryError
        method(*args)

    spec = Spec([Table("t", 5, "row")])
    model = shard(spec)
    found = []
    with ModelDeltaTracker(model) as tracker:
        for ids in ([1], [2], [0]):
            values = torch.tensor(ids)
            loss = model(KeyedJaggedTensor(keys=["t"], values=values, lengths=torch.tensor([1])))
            with mock.patch.object(owner, fails, fail_once):
                loss.backward()
            found.append(tracker.get_delta_ids()["ec.embeddings.t"].tolist())
        assert tracker.get_delta().num_rows == 0
        assert tracker.num_hook_errors == 1
    return found


def what_is_tracked(rank: int, world_size: int) -> dict[str, Any]:
    """Return names, features, modules, and skipped tables."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracker = ModelDeltaTracker(model, fqns_to_skip=["first", "ec.embeddings.row", "nonsense"])
    model(batch(spec, torch.Generator().manual_seed(rank))).backward()
    answer = {
        "tables": list(tracker.tables),
        "features": tracker.fqn_to_feature_names(),
        "modules": {fqn: type(module).__name__ for fqn, module in tracker.get_tracked_modules().items()},
        "warnings": [str(each.message) for each in caught],
        "read": list(tracker.get_delta()),
        "keys": [key.removesuffix(".weight") for key in model.state_dict() if "embeddings" in key],
        "errors": tracker.num_hook_errors,
    }
    tracker.detach()
    return answer


def one_name_in_two_modules(rank: int, world_size: int) -> list[str]:
    """The same table name under two owners is two tables; a model without dense parameters is tracked too."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (
                EmbeddingCollection(
                    tables=[EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=rows, feature_names=["t"])],
                    device=torch.device("meta"),
                )
                for rows in (4, 6)
            )

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return self.right(features)["t"].values().sum()

    from torchrec.distributed.embedding import EmbeddingCollectionSharder  # noqa: PLC0415
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise  # noqa: PLC0415
    from torchrec.distributed.types import ShardingPlan  # noqa: PLC0415

    model = Two()
    plans = {
        name: construct_module_sharding_plan(
            getattr(model, name),
            {"t": with_kernel(row_wise(), "fused")},
            sharder=EmbeddingCollectionSharder(),
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )
        for name in ("left", "right")
    }
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=[EmbeddingCollectionSharder()]
    )
    with ModelDeltaTracker(sharded) as tracker:
        ids = torch.tensor([0, 5])
        sharded(KeyedJaggedTensor(keys=["t"], values=ids, lengths=torch.tensor([2]))).backward()
        delta = tracker.get_delta()
        assert len(delta["left.embeddings.t"]) == 0
        assert delta["right.embeddings.t"].global_ids.tolist() == ([0] if rank == 0 else [5])
        return list(delta)


def refused(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors for invalid arguments of the constructor and of reads."""
    spec = Spec([Table("t", 6, "row"), Table("u", 6, "row")])
    model = shard(spec)

    def message(action: Any) -> str:
        try:
            action()
        except DeltaTrackerError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    tracker = ModelDeltaTracker(model, ["a", "b"])
    loss = model(batch(spec, torch.Generator().manual_seed(rank)))
    loss.backward()
    before = tracker.get_delta("a", commit=False).num_rows
    messages = {
        "no module": message(lambda: ModelDeltaTracker(nn.Sequential(nn.Linear(2, 2), _OtherEmbedding()))),
        "unsharded": message(
            lambda: ModelDeltaTracker(
                nn.ModuleDict(
                    {
                        "ec": EmbeddingCollection(
                            tables=[EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=4, feature_names=["t"])]
                        )
                    }
                )
            )
        ),
        "consumers": message(lambda: ModelDeltaTracker(model, ["a", "a"])),
        "no consumers": message(lambda: ModelDeltaTracker(model, [])),
        "mode": message(lambda: ModelDeltaTracker(model, mode="ids")),
        "skip": message(lambda: ModelDeltaTracker(model, fqns_to_skip="ec")),
        "unknown consumer": message(lambda: tracker.get_delta("c")),
        "no consumer": message(tracker.get_delta),
        "table": message(lambda: tracker.read_rows("ec.embeddings.x")),
        "rewind": message(lambda: tracker.rewind("a")),
    }
    assert tracker.get_delta("a").num_rows == before, "an error moved a cursor"
    assert tracker.num_hook_errors == 0
    tracker.detach()
    messages["detached"] = message(lambda: tracker.get_delta("a"))
    return messages


def detach_in_flight(rank: int, world_size: int) -> None:
    """A graph built before detaching runs untracked; two trackers on one model do not affect each other."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    first, second = ModelDeltaTracker(model), ModelDeltaTracker(model)
    loss = model(batch(spec, generator, size=8))
    first.detach()
    first.detach()
    loss.backward()
    assert second.get_delta().num_rows
    model(batch(spec, generator, size=8)).backward()
    assert second.get_delta().num_rows
    assert second.num_hook_errors == 0
    second.detach()
    hooks = [kernel._forward_hooks for kernel in kernels_of(model.module.ec)]
    assert not any(hooks)


def detached_on_one(rank: int, world_size: int) -> str:
    """Rank 1 has detached its tracker; return the error of a state that is gathered."""
    tracker = ModelDeltaTracker(shard(Spec([Table("t", 40, "row")])))
    if rank:
        tracker.detach()
    try:
        tracker.state_dict(strategy="gather")
    except DeltaTrackerError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        tracker.detach()
    return "nothing was raised"


def dropped(rank: int, world_size: int) -> None:
    """A tracker that is deleted without detach() leaves no hook and no log; one whose consumer is reserved stays."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    tracker = ModelDeltaTracker(model)
    handle = tracker.reserve()
    model(batch(spec, torch.Generator().manual_seed(rank))).backward()
    assert handle.read().num_rows
    log = weakref.ref(tracker._log)
    del tracker
    gc.collect()
    model(batch(spec, torch.Generator().manual_seed(rank))).backward()
    assert handle.read().num_rows, "recorded after the tracker was deleted"
    del handle
    gc.collect()
    assert log() is None
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not [hook for hook in hooks if "delta_tracker" in getattr(hook, "__module__", "")]
    model(batch(spec, torch.Generator().manual_seed(rank))).backward()


def rewound(rank: int, world_size: int) -> None:
    """With delete_on_read=False a consumer can start again; with True memory is freed after the last reader."""
    spec = Spec([Table("t", 40, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, ["a", "b"], delete_on_read=False) as tracker:
        seen: set[int] = set()
        for _ in range(3):
            model(batch(spec, generator)).backward()
            seen |= set(tracker.get_delta_ids("a")["ec.embeddings.t"].tolist())
        assert set(tracker.get_delta_ids("b")["ec.embeddings.t"].tolist()) == seen
        assert tracker.get_delta("a").num_rows == 0
        tracker.rewind("a")
        assert set(tracker.get_delta_ids("a")["ec.embeddings.t"].tolist()) == seen
    with ModelDeltaTracker(model, ["a", "b"]) as tracker:
        for name in ("a", "b", "a", "b"):
            model(batch(spec, generator)).backward()
            tracker.get_delta(name)
        model(batch(spec, generator)).backward()
        tracker.get_delta("a")
        tracker.get_delta("b")
        assert tracker.memory().total_bytes == 0


def detach_beside_another(rank: int, world_size: int) -> None:
    """The memory for reads stays while another tracker is attached."""
    model = shard(Spec([Table("large", 40_000, "table:0", dim=64)]))
    first, second = ModelDeltaTracker(model), ModelDeltaTracker(model)
    (fqn,) = first.tables
    all_rows = torch.arange(first.shards[fqn].num_rows)
    num_bytes = second.read_rows(fqn, all_rows).nbytes
    assert num_bytes > 8 << 20 if rank == 0 else num_bytes == 0
    first.detach()
    assert MEMORY.free_bytes >= num_bytes
    second.detach()
    assert MEMORY.free_bytes == 0
    second.reattach()
    first.detach()
    second.read_rows(fqn, all_rows)
    assert MEMORY.free_bytes >= num_bytes
    second.detach()
    assert MEMORY.free_bytes == 0
