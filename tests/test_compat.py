"""A program for TorchRec's tracker runs after its imports are changed."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker import delta_store, model_delta_tracker, types

from delta_tracker import Publisher, compat
from delta_tracker.errors import InvalidArgumentError
from tests.ranks import RankPool

_CASES = "tests.tracker.compat_cases"
_from_1_5 = pytest.mark.skipif(
    version("torchrec").startswith(("1.3.", "1.4.")), reason="its tracker has another interface"
)
_NOT_HERE = {
    "RawIdTrackerStore": "a store of TorchRec's RawIdTracker",
    "RawIndexedLookup": "a lookup of this store",
    "ModelDeltaTrackerTrec.record_momentum": "a hook: states are read from the optimizer",
    "ModelDeltaTrackerTrec.record_rowwise_optim_state": "a hook: states are read from the optimizer",
}


@_from_1_5
def test_a_program_reads_the_same_rows(two_ranks: RankPool) -> None:
    answers = two_ranks.run(f"{_CASES}:same_program")
    assert [(each["ID_ONLY"], each["EMBEDDING"]) for each in answers] == [(True, True)] * 2
    assert [each["empty"] for each in answers] == [0, 6]


@_from_1_5
@pytest.mark.parametrize(
    ("optimizer", "kind", "shapes"),
    [
        ("RowWiseAdagrad", "row", [[[9], [5]], [[8], [4]]]),
        ("Adagrad", "row", [[[9, 8], [5, 8]], [[8, 8], [4, 8]]]),
        ("RowWiseAdagrad", "table:1", [[], [[17], [9]]]),
        ("RowWiseAdagrad", "column:0,0", [[[17, 2], [9, 2]], []]),
        ("Adagrad", "column:0,0", [[[17, 8], [9, 8]], []]),
        ("SGD", "row", [[], []]),
    ],
)
def test_the_latest_states_are_those_of_the_optimizer(
    two_ranks: RankPool, optimizer: str, kind: str, shapes: list[list[list[int]]]
) -> None:
    answers = two_ranks.run(f"{_CASES}:latest_states", optimizer=optimizer, kind=kind)
    assert [list(answer["shapes"].values()) for answer in answers] == shapes
    assert all(answer["compared"] for answer in answers) == (optimizer != "SGD" and "column" not in kind)


@_from_1_5
@pytest.mark.parametrize("case", ["methods_of_dmp", "patches_in_any_order", "a_copy_of_the_model"])
def test_the_methods_of_dmp_are_patched(two_ranks: RankPool, case: str) -> None:
    two_ranks.run(f"{_CASES}:{case}")


@_from_1_5
@pytest.mark.advice("InvalidArgumentError: _check_tracker")
def test_a_publisher_of_states_needs_a_tracker_that_the_model_does_not_step(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    two_ranks.run(f"{_CASES}:publisher_and_data", url=f"file://{tmp_path}")


def _small() -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(9, 1, sparse=True, mode="sum"), nn.EmbeddingBag(5, 1, sparse=True))


def test_a_fraction_of_the_rows_is_those_that_moved_most() -> None:
    model = _small()
    config = compat.DeltaTrackerConfig(compat.TrackingMode.EMBEDDING)
    tracker = compat.init_torchrec_delta_tracker(model, config)
    model[0](torch.tensor([[1, 2, 2, 2, 3, 3, 4]])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    tracker.step()
    rows = tracker.get_unique(top_percentage=0.5)["0"]
    assert rows.ids.tolist() == [2, 3]
    assert rows.states is not None
    assert rows.states.shape == (2, 1)
    assert tracker.get_unique_ids()["0"].tolist() == [1, 4]
    with pytest.raises(InvalidArgumentError, match=r"per_table_percentage=.*top_k=TopK"):
        tracker.get_unique(per_table_percentage={"0": (0.5, "l2")})
    with pytest.raises(InvalidArgumentError, match="fraction=7"):
        tracker.get_unique(top_percentage=7)


def test_a_read_returns_tables_without_changes() -> None:
    model = _small()
    tracker = compat.init_torchrec_delta_tracker(model, compat.DeltaTrackerConfig(compat.TrackingMode.EMBEDDING))
    for _ in range(2):
        rows = tracker.get_unique()
        assert list(rows) == ["0", "1"]
        assert [each.ids.shape for each in rows.values()] == [(0,), (0,)]
        assert [each.states.shape for each in rows.values() if each.states is not None] == [(0, 1), (0, 1)]
        assert [each.tolist() for each in tracker.get_unique_ids().values()] == [[], []]


def test_lookups_are_recorded_with_the_arguments_of_torchrec() -> None:
    model = _small()
    tracker = compat.ModelDeltaTrackerTrec(model)
    with pytest.raises(AssertionError, match="kjt="):
        tracker.record_lookup(torch.tensor([1]), torch.zeros(1), emb_module=model[0])  # type: ignore[arg-type]


@pytest.mark.promise("refused")
def test_errors_are_those_of_both_libraries() -> None:
    tracker, store = compat.ModelDeltaTrackerTrec(_small()), compat.DeltaStoreTrec(compat.UpdateMode.FIRST)
    calls = [
        lambda: tracker.get_unique("nobody"),
        lambda: tracker.get_unique_ids("nobody"),
        lambda: tracker.clear("nobody"),
        lambda: store.compact(5, 3),
        lambda: store.append(0, "t", torch.tensor([1])),
    ]
    for call in calls:
        with pytest.raises(compat.TorchrecAssertionError) as raised:
            call()
        assert isinstance(raised.value, AssertionError)
        assert isinstance(raised.value, InvalidArgumentError)
        assert raised.value.remedy.startswith(("Pass", "Name"))


def test_a_store_has_the_names_and_the_lookups_of_torchrec() -> None:
    store = compat.DeltaStore(updateMode=compat.UpdateMode.LAST)
    for index in (2, 3, 5):
        store.append(batch_idx=index, fqn="t", ids=torch.tensor([index]), states=torch.tensor([0.5 * index]))
    assert store.updateMode is compat.UpdateMode.LAST
    assert store.per_fqn_lookups == {
        "t": [compat.IndexedLookup(index, torch.tensor([index]), torch.tensor([0.5 * index])) for index in (2, 3, 5)]
    }
    assert store.get_indexed_lookups(3, 5)["t"] == store.per_fqn_lookups["t"][1:2]
    store.compact(2, 4)
    assert [(each.batch_idx, each.ids.tolist()) for each in store.per_fqn_lookups["t"]] == [(2, [2, 3]), (5, [5])]
    store.delete(up_to_idx=5)
    rows = store.get_unique(0)["t"]
    assert (rows.ids.tolist(), rows.states.tolist()) == ([5], [2.5])
    store.delete()
    assert store.per_fqn_lookups == store.get_unique() == {}


def test_only_lookups_have_states_that_no_read_needs() -> None:
    store = compat.DeltaStore()
    store.append(0, "t", torch.tensor([7]), torch.tensor([0.7]))
    store.append(1, "t", torch.tensor([3]), None, raw_ids=torch.tensor([30]))
    assert [each.states for each in store.per_fqn_lookups["t"]] == [torch.tensor([0.7]), None]
    assert store.get_unique() == {"t": compat.UniqueRows(mock.ANY, None)}
    assert store.get_unique()["t"].ids.tolist() == [3, 7]
    with pytest.raises(AssertionError, match="states="):
        store.append(2, "t", torch.tensor([1, 2]), torch.tensor([0.7]))


@_from_1_5
@pytest.mark.parametrize("module", [types, delta_store, model_delta_tracker], ids=lambda module: module.__name__)
def test_the_names_and_arguments_of_torchrec_are_there(module: ModuleType) -> None:
    public = {name: each for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__}
    theirs = {name: each for name, each in public.items() if inspect.isclass(each)}
    assert theirs
    assert not {name for name in theirs if not hasattr(compat, name)} - _NOT_HERE.keys()
    for name in theirs.keys() - _NOT_HERE.keys():
        ours = getattr(compat, name)
        methods = {key: each for key, each in inspect.getmembers(theirs[name], inspect.isfunction) if key[0] != "_"}
        if not inspect.isabstract(theirs[name]):
            methods["__init__"] = theirs[name].__init__
        for key in methods.keys() - {each.partition(".")[2] for each in _NOT_HERE}:
            wanted, found = (list(inspect.signature(each).parameters) for each in (methods[key], getattr(ours, key)))
            assert found[: len(wanted)] == wanted, f"{name}.{key}"
        if hasattr(theirs[name], "__members__"):
            assert {each.name: each.value for each in theirs[name]} == {each.name: each.value for each in ours}


@pytest.mark.advice("InvalidArgumentError: TorchrecPatch.__init__")
def test_an_old_torchrec_is_not_patched() -> None:
    model = _small()
    methods = {"init_torchrec_delta_tracker", "get_delta_tracker", "_init_delta_tracker"}
    others = {name: each for name, each in vars(DistributedModelParallel).items() if name not in methods}
    with (
        mock.patch("torchrec.distributed.model_parallel.DistributedModelParallel", type("Old", (nn.Module,), others)),
        pytest.raises(InvalidArgumentError, match=r"Call init_torchrec_delta_tracker\(model, config\)"),
    ):
        compat.patch_torchrec()
    assert compat.init_torchrec_delta_tracker(model, compat.DeltaTrackerConfig()).get_unique_ids()


def test_other_names() -> None:
    assert compat.ModelDeltaTracker is compat.ModelDeltaTrackerTrec
    assert compat.ModelTrackerConfigs(compat.RawIdTrackerConfig()).raw_id_tracker_config.delete_on_read
    assert compat.ModelDeltaTrackerTrec(_small()).table_to_fqn == {"0": "0", "1": "1"}
    with pytest.raises(AttributeError, match="NOTHING"):
        compat.NOTHING  # noqa: B018


def test_a_publisher_says_how_torchrecs_own_tracker_is_replaced() -> None:
    own = object.__new__(model_delta_tracker.ModelDeltaTrackerTrec)
    with pytest.raises(InvalidArgumentError, match=r"Call patch_torchrec\(\) of delta_tracker.compat before"):
        Publisher(own, "memory://")  # type: ignore[arg-type]
