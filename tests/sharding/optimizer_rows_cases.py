"""Cases for the states and numbers of fused optimizers; each runs on every rank."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from delta_tracker import ModelDeltaTracker
from delta_tracker.errors import (
    InvalidArgumentError,
    RestoreMismatchError,
    UnfinishedStepError,
    UnsupportedModelError,
)
from delta_tracker.sharding.discover import discover
from delta_tracker.sharding.optimizer_rows import check_scalars, write_scalars
from delta_tracker.sharding.refusals import refuse_unrecoverable
from delta_tracker.sharding.torchrec_api import tbe_of
from delta_tracker.types import StateSpec
from tests.models import Spec, Table, batch, shard

_NAMES = {
    "SGD": ("EXACT_SGD", ()),
    "Adagrad": ("EXACT_ADAGRAD", (StateSpec("momentum1", torch.float32, "columns"),)),
    "RowWiseAdagrad": ("EXACT_ROWWISE_ADAGRAD", (StateSpec("momentum1", torch.float32, "range"),)),
}


def _model(world_size: int, **kwargs: Any) -> tuple[Spec, Any]:
    tables = Spec.every_sharding(world_size).tables
    spec = Spec([*tables, Table("dense", 7, "row", kernel="dense"), Table("replica", 5, "data")], bag=True, **kwargs)
    return spec, shard(spec)


def views(rank: int, world_size: int, optimizer: str) -> None:
    """The views are those of FBGEMM, for each column range, and follow training."""
    spec, model = _model(world_size, optimizer=optimizer)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        tracker.live.check_recoverable()
        held = {fqn: tracker.live.state_views(fqn) for fqn in tracker.tables}
        for _ in range(3):
            model(batch(spec, generator)).backward()
        name, states = _NAMES[optimizer]
        for fqn, shard_spec in tracker.shards.items():
            found = tracker.live.table_states.get(fqn)
            if fqn not in tracker.live.fused_tables or not shard_spec.columns:
                assert found is None
                assert not any(held[fqn])
                continue
            assert found is not None
            assert (found.optimizer, found.columns, found.states) == (name, shard_spec.columns, states)
            for columns, each, (kernel, slot) in zip(
                shard_spec.columns, held[fqn], tracker._model.shards[fqn].holders, strict=True
            ):
                theirs = tbe_of(kernel.module).split_optimizer_states()
                expected = theirs[slot] if states else []
                assert len(each) == len(expected) == len(states)
                for view, state, own in zip(each, expected, states, strict=True):
                    width = columns[1] - columns[0] if own.width == "columns" else 1
                    assert view.shape == (shard_spec.num_rows, width)
                    assert view.dtype == own.dtype
                    assert view.data_ptr() == state.data_ptr()
                    assert torch.equal(view.flatten(), state.flatten())
                    assert view.count_nonzero() > 0
        storages = tracker.live.unfused_storages()
        parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
        assert {fqn: is_replicated for fqn, (_, is_replicated) in storages.items()} == {
            "ec.embedding_bags.dense": False,
            "ec.embedding_bags.replica": True,
        }
        for fqn, (addresses, _) in storages.items():
            assert addresses, fqn
            assert addresses <= parameters


def scalars(rank: int, world_size: int) -> None:
    """The numbers are read and written in all their holders, and the optimizer keeps a learning rate that was set."""
    spec, model = _model(world_size)
    other_spec, other = _model(world_size)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(batch(spec, generator)).backward()
    with torch.no_grad():
        model(batch(spec, generator))  # counts in iter_cpu, too
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.25
    with ModelDeltaTracker(model) as tracker, ModelDeltaTracker(other) as target:
        read = tracker.live.kernel_scalars()
        shards = target._model.shards
        assert read.keys() == {fqn for fqn in tracker.live.fused_tables if tracker.shards[fqn].columns}
        assert all(each["group_lr"] == 0.25 != each["lr"] for each in read.values())
        assert all(each["iter_cpu"] >= 3 for each in read.values())
        first = next(iter(read))
        read[first] |= {"eps": 0.5, "beta1": 0.5, "beta2": 0.75, "weight_decay": 0.125}
        kernel = shards[first].holders[0][0]
        alike = {fqn: read[first] for fqn in read if any(each is kernel for each, _ in shards[fqn].holders)}
        before = target.live.kernel_scalars()
        if len(alike) > 1:
            with pytest.raises(RestoreMismatchError, match="eps"):
                check_scalars(shards, read)
        with pytest.raises(RestoreMismatchError, match=first):
            check_scalars(shards, {fqn: each for fqn, each in read.items() if fqn != first})
        without = {fqn: {name: each for name, each in read[first].items() if name != "beta2"} for fqn in alike}
        with pytest.raises(RestoreMismatchError, match="beta2"):
            check_scalars(shards, read | without)
        assert target.live.kernel_scalars() == before
        check_scalars(shards, read | alike)
        write_scalars(shards, read | alike)
        assert target.live.kernel_scalars() == read | alike
        other.fused_optimizer.zero_grad()
        assert all(each["lr"] == 0.25 for each in target.live.kernel_scalars().values())
        other(batch(other_spec, generator)).backward()
        assert target.live.kernel_scalars()[first]["iter_cpu"] == read[first]["iter_cpu"] + 1
        device_kernel = tbe_of(shards[first].holders[0][0].module)
        counter = torch.zeros(1, dtype=torch.int64, device="meta")  # raises if its value is read
        with mock.patch.object(device_kernel, "iter", counter):
            assert target.live.kernel_scalars()[first]["iter"].device.type == "meta"
        column = target._model.shards["ec.embedding_bags.stacked"].holders
        if len({id(each) for each, _ in column}) > 1:
            tbe_of(column[0][0].module).iter_cpu += 1
            with pytest.raises(InvalidArgumentError, match="with the same settings"):
                target.live.kernel_scalars()
            tbe_of(column[0][0].module).iter_cpu -= 1
            target.live.kernel_scalars()


def refused(rank: int, world_size: int) -> None:
    """Counters of a kernel are refused on the rank that has them."""
    _, model = _model(world_size)
    found = discover(model)
    refuse_unrecoverable(found, {})
    tbe = tbe_of(next(each for each in found.kernels if each.is_fused).module)
    for name in ("use_rowwise_bias_correction", "_used_rowwise_adagrad_with_global_weight_decay"):
        before = getattr(tbe, name)
        setattr(tbe, name, True)
        with pytest.raises(UnsupportedModelError, match="counters that cannot be published"):
            refuse_unrecoverable(found, {})
        setattr(tbe, name, before)
    decay = type(tbe.weight_decay_mode)
    for mode in (decay.COUNTER, decay.COWCLIP):
        before, tbe.weight_decay_mode = tbe.weight_decay_mode, mode
        with pytest.raises(UnsupportedModelError, match=mode.name):
            refuse_unrecoverable(found, {})
        tbe.weight_decay_mode = before


def waiting(rank: int, world_size: int) -> None:
    """A read waits for lookups and writes in progress, in any thread, and not for graphs that are garbage."""
    spec, model = _model(world_size)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker, tracker.reserve() as handle:
        handle.wait_for_updates(0)
        with torch.no_grad():
            output = model(batch(spec, generator))
        handle.wait_for_updates(0)
        output = model(batch(spec, generator))
        with pytest.raises(UnfinishedStepError, match="before the backward pass"):
            handle.wait_for_updates(0.005)
        del output
        handle.wait_for_updates(0)
        cycle: list[Any] = [model(batch(spec, generator))]
        cycle.append(cycle)
        gc.disable()
        try:
            del cycle
            assert tracker._hooks.lookups_in_flight()
            handle.wait_for_updates(0)
        finally:
            gc.enable()
        output = model(batch(spec, generator))
        is_inside, is_free = threading.Event(), threading.Event()
        raised: list[object] = []
        begin_before = tracker._log.writes.begin_write

        def begin_write(key: int, ids: Any) -> None:
            begin_before(key, ids)
            if not tracker._hooks.lookups_in_flight():  # the last of the kernels
                is_inside.set()
                is_free.wait(20)

        for hook in tracker._hooks.registered:
            hook._listener = _Listening(hook._listener, begin_write)
        thread = threading.Thread(target=output.backward)
        thread.start()
        is_inside.wait(20)
        try:
            handle.wait_for_updates(0.005)
        except UnfinishedStepError as error:
            raised.append(str(error))
        is_free.set()
        handle.wait_for_updates(20)
        thread.join()
        assert len(raised) == 1
        assert tracker._hooks.lookups_in_flight() == tracker._log.writes.num_writes() == 0
        assert output is not None  # it is in use, but its backward pass has begun


class _Listening:
    """A listener whose ``begin_write`` is another function."""

    def __init__(self, listener: Any, begin_write: Any) -> None:
        self._listener = listener
        self.begin_write = begin_write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def written(rank: int, world_size: int) -> None:
    """States that are written in place are found; those that a backward pass writes are not."""
    spec, model = _model(world_size)
    with ModelDeltaTracker(model) as tracker:
        watch = tracker.live.watch_states()
        model(batch(spec, torch.Generator().manual_seed(rank))).backward()
        assert list(watch.written()) == []
        model.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
        held = [fqn for fqn, each in tracker.shards.items() if each.num_rows and fqn in tracker.live.fused_tables]
        assert list(watch.written()) == held
        assert list(watch.written()) == []
        # As after a reshard that leaves this rank no rows.
        watch._shards = lambda: dict.fromkeys(held, SimpleNamespace(holders=()))  # type: ignore[arg-type]
        assert list(watch.written()) == []


def others(rank: int, world_size: int) -> None:
    """The other consumers are described by their cursors and by the rows that reads left out."""
    del rank
    spec, model = _model(world_size)
    with ModelDeltaTracker(model, ["stream", "slow", "quick"]) as tracker, tracker.reserve("stream") as handle:
        model(batch(spec, torch.Generator().manual_seed(0))).backward()
        tracker.get_delta("quick")
        first = handle.others()
        assert first.keys() == {"slow", "quick"}
        assert first["slow"] == (0, {})
        assert first["quick"][0] > 0
        fqn = next(fqn for fqn, each in tracker.shards.items() if each.num_rows > 2)
        with tracker.reserve("slow") as slow, handle.begin_copy():
            slow.make_pending(fqn, torch.tensor([2, 0]))
            found = handle.others()
        assert found["slow"][0] == 0
        assert {name: ids.tolist() for name, ids in found["slow"][1].items()} == {fqn: [0, 2]}
        assert found.keys() == {"slow", "quick"}
