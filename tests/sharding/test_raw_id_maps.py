"""Predictors of TorchRec's managed-collision modules: every raw id reads what it reads in the trainer's module."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver, QConfig
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.fused_params import (
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
)
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.mc_modules import InferManagedCollisionCollectionSharder
from torchrec.distributed.quant_embedding import (
    QuantEmbeddingCollectionSharder,
    QuantManagedCollisionEmbeddingCollectionSharder,
)
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingEnv, ShardMetadata
from torchrec.fx import Tracer
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.quant.embedding_modules import (
    QuantManagedCollisionEmbeddingCollection,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import InvalidArgumentError, ModelMismatchError
from delta_tracker.predictor.identities import find_maps
from delta_tracker.raw_ids import NO_OWNER, bucket_of
from delta_tracker.raw_ids.index import RawIdIndex
from delta_tracker.sharding.raw_id_maps import HashMap, MchMap, raw_id_maps
from delta_tracker.types import Bucket, Identity
from tests.predictor.identity_histories import DIM, FQN, History, Schedule
from tests.ranks import RankPool
from tests.sharding.raw_id_followers import ModelFollower
from tests.sweeps import SWEEPS_ARE_WHOLE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls a deprecated function of torch
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

_CASES = "tests.sharding.raw_id_maps_cases"
_CPU = torch.device("cpu")


class _Model(nn.Module):
    """Model with one table ``t`` of managed collisions."""

    def __init__(self, module: nn.Module, *, is_bag: bool = False) -> None:
        super().__init__()
        config = EmbeddingBagConfig if is_bag else EmbeddingConfig
        tables = [config(name="t", num_embeddings=module.output_size(), embedding_dim=DIM, feature_names=["f"])]
        collisions = ManagedCollisionCollection({"t": module}, tables)
        if is_bag:
            collection = EmbeddingBagCollection(tables=tables, device=_CPU)
            self.mc: Any = ManagedCollisionEmbeddingBagCollection(collection, collisions)
        else:
            self.mc = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=tables, device=_CPU), collisions)
        self.eval()

    @torch.no_grad()
    def forward(self, raw_ids: Tensor) -> Tensor:
        features = KeyedJaggedTensor(["f"], raw_ids, lengths=torch.ones(len(raw_ids), dtype=torch.int32))
        found, _ = self.mc(features)
        return found.values() if isinstance(self.mc, ManagedCollisionEmbeddingBagCollection) else found["f"].values()


def _mch(num_rows: int, hash_size: int, **kwargs: Any) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(
        zch_size=num_rows,
        device=_CPU,
        eviction_policy=DistanceLFU_EvictionPolicy(),
        eviction_interval=2,
        input_hash_size=hash_size,
        **kwargs,
    )


def _collision(model: _Model) -> Any:
    return model.mc._managed_collision_collection._managed_collision_modules["t"]


def _history(num_buckets: int) -> History:
    return History(num_buckets, num_buckets, num_rows=8, has_defaults=True)


def _predictor(model: nn.Module, history: History, path: str = "mc._embedding_module.embeddings.t") -> Predictor:
    return Predictor(ModelTarget(model, names={FQN: path}, dense=False), history.storage)


def _assert_answers(model: nn.Module, history: History) -> None:
    state = history.states[history.version]
    expected = state.rows[state.slots_of(history.raw_ids)]
    assert torch.equal(model(history.raw_ids), expected)


@pytest.mark.parametrize("num_buckets", [1, 2, 4])
@pytest.mark.parametrize("is_bag", [False, True])
def test_every_raw_id_reads_what_it_reads_in_the_trainers_module(num_buckets: int, is_bag: bool) -> None:
    history = _history(num_buckets)
    model = _Model(_mch(history.num_rows, history.hash_size), is_bag=is_bag)
    holder = "embedding_bags" if is_bag else "embeddings"
    predictor = _predictor(model, history, f"mc._embedding_module.{holder}.t")
    for step in ("delta", "delta", "snapshot", "delta", "restart", "delta"):
        predictor.sync()
        _assert_answers(model, history)
        getattr(history, step)()
    predictor.rollback(2)
    history.states[history.version] = history.states[2]
    _assert_answers(model, history)


def test_a_renamed_table_has_the_mapping_of_the_models_table() -> None:
    """Also if the model has a table of the stream's name."""
    model = nn.ModuleDict({each: _Model(_mch(8, 100)) for each in ("user", "user_v2")})
    user, other = (f"{each}.mc._embedding_module.embeddings.t" for each in model)
    found = find_maps(model, {user: other})
    assert {name: each.memory.data_ptr() for name, (each,) in found.items()} == {
        user: _collision(model["user_v2"])._mch_remapped_ids_mapping.data_ptr()  # type: ignore[arg-type]
    }


def test_copies_of_a_model_route_unknown_raw_ids_themselves() -> None:
    history = _history(2)
    model = _Model(_mch(history.num_rows, history.hash_size))
    _predictor(model, history).sync()
    held = copy.deepcopy(model)
    _collision(model)._mch_sorted_raw_ids.fill_(NO_OWNER)
    _assert_answers(held, history)


def test_kept_tables() -> None:
    """A restarted predictor answers right before its first version."""
    history = _history(2)
    model, restarted = (_Model(_mch(history.num_rows, history.hash_size)) for _ in range(2))
    predictor = _predictor(model, history)
    predictor.sync()
    restarted.load_state_dict(model.state_dict())
    other = _predictor(restarted, history)
    other.load_state_dict(predictor.state_dict())
    _assert_answers(restarted, history)
    history.delta()
    other.sync()
    _assert_answers(restarted, history)


def test_tables_that_are_kept_while_the_buckets_change(monkeypatch: pytest.MonkeyPatch) -> None:
    history = _history(2)
    model, restarted = (_Model(_mch(history.num_rows, history.hash_size)) for _ in range(2))
    predictor = _predictor(model, history)
    predictor.sync()
    history.restart(1)
    for name in [each for each in history.storage.names("parts") if f"{history.version:020}" in each]:
        history.storage.delete(name)  # so that the next snapshot is applied
    for _ in range(100):
        history.train()
    history.snapshot()
    assert history.owners[3] != NO_OWNER
    with monkeypatch.context() as patch:
        patch.setattr(predictor._destination, "_map", _fail)
        with pytest.raises(MemoryError):
            predictor.sync()
    restarted.load_state_dict(model.state_dict())
    other = _predictor(restarted, history)
    other.load_state_dict(predictor.state_dict())
    for each in (model, restarted):
        found = each(history.raw_ids)[:, 0]
        assert bool(((found == -1) | (found == torch.arange(len(found)))).all())
    other.sync()
    _assert_answers(restarted, history)


def test_tables_that_are_kept_after_a_failed_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a position too, unknown raw ids read the default rows of their own buckets."""
    history = _history(2)
    model, restarted = (_Model(_mch(history.num_rows, history.hash_size)) for _ in range(2))
    predictor = _predictor(model, history)
    first = predictor.sync()
    for _ in range(20):
        history.train()
    history.delta()
    predictor.sync()
    with monkeypatch.context() as patch:
        patch.setattr(predictor._destination, "_map", _fail)
        with pytest.raises(MemoryError):
            predictor.rollback(first)
    state = predictor.state_dict()
    assert list(state) == ["identities"]
    restarted.load_state_dict(model.state_dict())
    other = _predictor(restarted, history)
    other.load_state_dict(state)
    assert other.version is None
    assert torch.equal(restarted(history.raw_ids), model(history.raw_ids))
    other.sync()
    _assert_answers(restarted, history)


def _fail(*_: object) -> None:
    raise MemoryError("no memory")


def test_a_position_of_another_model_is_refused() -> None:
    history = _history(2)
    predictor = _predictor(_Model(_mch(history.num_rows, history.hash_size)), history)
    predictor.sync()
    model = _Model(_mch(history.num_rows, history.hash_size + 1))
    with pytest.raises(InvalidArgumentError, match="input_hash_size"):
        _predictor(model, history).load_state_dict(predictor.state_dict())


def _quantized(history: History, num_shards: int = 0) -> _Model:
    """Return a quantized model; with ``num_shards``, its table is sharded by rows in this process."""
    model = _Model(_mch(history.num_rows, history.hash_size))
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, [EmbeddingCollection])
    model.mc.qconfig = QConfig(
        activation=PlaceholderObserver.with_args(dtype=torch.float),
        weight=PlaceholderObserver.with_args(dtype=torch.qint8),
    )
    model.mc = QuantManagedCollisionEmbeddingCollection.from_float(model.mc)
    if num_shards:
        set_propogate_device(True)
        fused_params = {FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: True, FUSED_PARAM_REGISTER_TBE_BOOL: True}
        sharder = QuantManagedCollisionEmbeddingCollectionSharder(
            QuantEmbeddingCollectionSharder(fused_params=fused_params), InferManagedCollisionCollectionSharder()
        )
        size = history.num_rows // num_shards
        shards = [
            ShardMetadata(shard_offsets=[rank * size, 0], shard_sizes=[size, DIM], placement=f"rank:{rank}/cpu")
            for rank in range(num_shards)
        ]
        spec = EnumerableShardingSpec(shards)
        plan = {"t": ParameterSharding("row_wise", "quant", list(range(num_shards)), sharding_spec=spec)}
        model.mc = sharder.shard(model.mc, plan, ShardingEnv.from_local(num_shards, 0), device=_CPU)
    return model.eval()


@pytest.mark.parametrize("num_shards", [0, 1])
def test_quantized_tables(num_shards: int) -> None:
    history = _history(2)
    model = _quantized(history, num_shards)
    assert list(raw_id_maps(model)) == ["mc.embeddings.t"]
    predictor = _predictor(model, history, "mc.embeddings.t")
    for _ in range(3):
        predictor.sync()
        state = history.states[history.version]
        expected = state.rows[state.slots_of(history.raw_ids)]
        assert float((model(history.raw_ids) - expected).abs().max()) < 0.5  # ids and times are integers
        history.delta()


def test_quantized_tables_of_several_shards_are_refused() -> None:
    history = _history(2)
    predictor = _predictor(_quantized(history, 2), history, "mc.embeddings.t")
    with pytest.raises(ModelMismatchError, match="quantized in 2 shards"):
        predictor.sync()


@pytest.mark.parametrize("hash_size", [0, 100, 2**63 - 1])
def test_a_table_that_is_sharded_as_in_the_trainer(two_ranks: RankPool, hash_size: int) -> None:
    assert min(two_ranks.run(f"{_CASES}:answers", num_buckets=2, hash_size=hash_size)) > 0


def test_a_table_that_is_sharded_over_four_ranks(four_ranks: RankPool) -> None:
    assert min(four_ranks.run(f"{_CASES}:answers", num_buckets=4, hash_size=100, num_rows=16)) > 0


def test_a_table_that_is_sharded_to_one_rank(one_rank: RankPool) -> None:
    assert min(one_rank.run(f"{_CASES}:answers", num_buckets=2, hash_size=100)) > 0


@pytest.mark.parametrize("num_buckets", [1, 4])
def test_a_table_that_is_sharded_to_other_ranks_is_refused(two_ranks: RankPool, num_buckets: int) -> None:
    for reason in two_ranks.run(f"{_CASES}:refusal", num_buckets=num_buckets):
        assert "on one of 2 ranks, to which TorchRec does not route raw ids as to" in reason


def test_one_module_of_two_tables_is_refused() -> None:
    """A quantized copy shares the module of the float model."""
    history = _history(1)
    model = _Model(_mch(history.num_rows, history.hash_size))
    both = nn.ModuleDict({"a": model, "b": model})
    predictor = Predictor(
        ModelTarget(both, names={FQN: "a.mc._embedding_module.embeddings.t"}, dense=False), history.storage
    )
    manifest = predictor._reader.newest()[0]
    name = "b.mc._embedding_module.embeddings.t"
    tables = {FQN: manifest.tables[FQN], name: replace(manifest.tables[FQN], fqn=name)}
    both_tables = type(manifest)(
        **{
            **{
                each: getattr(manifest, each)
                for each in ("stream", "generation", "writer", "version", "kind", "created")
            },
            "tables": tables,
            "identities": dict.fromkeys(tables, manifest.identities[FQN]),
        }
    )
    with pytest.raises(ModelMismatchError, match="shared with"):
        predictor._destination.resolve(both_tables)


_ONE = Identity(100, (Bucket((0, 8), 7),))
_TWO = Identity(100, (Bucket((0, 4), 3), Bucket((4, 8), 7)))


class _OtherRemap(MCHManagedCollisionModule):
    def remap(self, features: Any, *args: Any, **kwargs: Any) -> Any:
        return super().remap(features, *args, **kwargs)


def _shard(first: int, end: int, segments: list[int]) -> MCHManagedCollisionModule:
    return _mch(8, 100).rebuild_with_output_id_range((first, end), segments, _CPU).eval()


@pytest.mark.parametrize(
    ("module", "num_shards", "identity", "reason"),
    [
        (_mch(8, 100).eval(), 1, _ONE, ""),
        (_mch(8, 100).eval(), 1, _TWO, ""),
        (_shard(4, 8, [0, 4, 8]), 1, _TWO, ""),
        (_mch(8, 100), 1, _ONE, "training mode"),
        (_mch(8, 99).eval(), 1, _ONE, "input_hash_size=99 instead of 100"),
        (_mch(9, 100).eval(), 1, _ONE, "the rows .0, 9. on one of 1 ranks"),
        (_mch(8, 100).eval(), 2, _ONE, "2 shards"),
        (_mch(8, 100).eval(), 1, Identity(100, (Bucket((0, 8), None),)), "has default rows"),
        (_shard(4, 8, [0, 4, 8]), 1, _ONE, "one of 2 ranks"),
        (_shard(4, 8, [0, 2, 4, 8]), 1, _TWO, "one of 3 ranks"),
        (_shard(0, 4, [0, 4, 8]), 1, Identity(100, tuple(Bucket((x, x + 2), x + 1) for x in (0, 2, 4, 6))), "ranks"),
    ],
)
def test_refusals_of_sorted_modules(module: Any, num_shards: int, identity: Identity, reason: str) -> None:
    found = MchMap(module, num_shards).refusal(identity)
    assert re.search(reason, found)
    assert bool(found) == bool(reason)


def test_other_remaps_are_refused() -> None:
    module = _mch(8, 100).eval()
    module.remap = lambda features: features
    other = _OtherRemap(
        zch_size=8, device=_CPU, eviction_policy=DistanceLFU_EvictionPolicy(), eviction_interval=2, input_hash_size=100
    ).eval()
    for each in (module, other):
        assert "another remap" in MchMap(each, 1).refusal(_ONE)


def _hash(**kwargs: Any) -> HashZchManagedCollisionModule:
    if "disable_fallback" not in inspect.signature(HashZchManagedCollisionModule).parameters:
        pytest.skip("this torchrec has no disable_fallback")
    options = {"input_hash_size": 100, "max_probe": 4, "disable_fallback": True, "is_inference": True, **kwargs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it copies a tensor with torch.tensor()
        return HashZchManagedCollisionModule(zch_size=8, device=_CPU, total_num_buckets=2, **options)


_HASHED = Identity(100, (Bucket((0, 4), None), Bucket((4, 8), None)))


@pytest.mark.parametrize(
    ("options", "num_shards", "identity", "reason"),
    [
        ({}, 1, _HASHED, ""),
        ({"disable_fallback": False}, 1, _HASHED, "build it with disable_fallback=True"),
        ({"no_bag": True}, 1, _HASHED, "no_bag"),
        ({"is_inference": False}, 1, _HASHED, "training mode"),
        ({"input_hash_size": 50}, 1, _HASHED, "input_hash_size=50 instead of 100"),
        ({}, 2, _HASHED, "several shards"),
        ({}, 1, Identity(100, (Bucket((0, 8), None),)), "other buckets"),
        ({}, 1, _TWO, "no default rows"),
    ],
)
def test_refusals_of_hash_modules(options: dict[str, Any], num_shards: int, identity: Identity, reason: str) -> None:
    found = HashMap(_hash(**options), num_shards).refusal(identity)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_hash_module_finds_its_raw_ids() -> None:
    module = _hash()
    mapping = HashMap(module, 1)
    free = _hash(disable_fallback=False)
    ids = torch.arange(100)
    home = free.remap({"f": JaggedTensor(ids, lengths=torch.ones(100, dtype=torch.int64))})["f"].values()
    owners = torch.full((8,), NO_OWNER)
    for raw_id, slot in zip(ids.tolist(), home.tolist(), strict=True):
        if owners[slot] == NO_OWNER:
            owners[slot] = raw_id
    owned = (owners != NO_OWNER).nonzero().flatten()
    assert mapping.conflict(owned, owners[owned]) == ""
    assert bool((mapping.owners() == NO_OWNER).all())
    mapping.map(mapping.prepare(owners))
    assert torch.equal(mapping.owners(), owners)
    assert "reserves the raw id -1" in mapping.conflict(torch.tensor([0]), torch.tensor([-1]))
    for raw_id in (-2, 100, 2**62):  # which TorchRec's module cannot look up, but may get on a sharded trainer
        assert "outside 0 to 100" in mapping.conflict(torch.tensor([0]), torch.tensor([raw_id]))
    other = HashMap(_hash(max_probe=1), 1)
    assert other.conflict(owned, owners[owned]) == ""  # each id is in its first row
    moved = (owned + 1) % 4 + owned // 4 * 4
    assert mapping.conflict(moved[:1], owners[owned[:1]]) == ""
    assert "max_probe=1" in other.conflict(moved[:1], owners[owned[:1]])
    known = owners[owners != NO_OWNER]
    assert torch.equal(owners[mapping.slots_of(known)], known)
    assert mapping.slots_of(torch.tensor([99 if 99 not in known else 98, NO_OWNER])).tolist()[1] == -1

    def rows_of(raw_ids: Tensor) -> Tensor:
        found = module({"f": JaggedTensor(raw_ids, lengths=torch.ones(len(raw_ids), dtype=torch.int64))})["f"]
        return torch.full(raw_ids.shape, -1).masked_scatter(found.lengths() > 0, found.values())

    assert torch.equal(owners[rows_of(known)], known)
    assert bool((rows_of(ids)[~torch.isin(ids, known)] == -1).all())
    slots = (owners != NO_OWNER).nonzero().flatten()[:2]
    mapping.unmap(slots, owners[slots])
    assert rows_of(owners[slots]).tolist() == [-1, -1]
    assert mapping.routes_by(_HASHED)
    assert torch.equal(bucket_of(_HASHED, known), home[known] // 4)


@pytest.mark.advice("ModelMismatchError: _change")
def test_a_predictor_of_a_hash_module() -> None:
    history = History(0, 2, num_rows=8, hash_size=100, has_defaults=False)
    model = _Model(_hash())
    home = _hash(disable_fallback=False)
    ids = torch.arange(100)
    lengths = torch.ones(100, dtype=torch.int64)
    slots = home.remap({"f": JaggedTensor(ids, lengths=lengths)})["f"].values().tolist()
    predictor = _predictor(model, history)
    for first in (70, 20, 0):
        owners = {}
        for raw_id in range(first, 100):
            owners.setdefault(slots[raw_id], raw_id)
        for slot in range(8):
            history.owners[slot] = owners.get(slot, NO_OWNER)
            history._write(slot)
        blocks = [
            history._block(each.rows, None, history.owners[slice(*each.rows)], history.rows[slice(*each.rows)])
            for each in history.identity.buckets
        ]
        history._commit("snapshot", blocks, list(range(8)))
        predictor.sync()
        found = _collision(model)({"f": JaggedTensor(ids, lengths=lengths)})["f"]
        assert found.values().tolist() == [slots[raw_id] for raw_id in ids.tolist() if raw_id in owners.values()]
        assert torch.equal(found.lengths() > 0, torch.isin(ids, torch.tensor(list(owners.values()))))
        (mapping,) = raw_id_maps(model)["mc._embedding_module.embeddings.t"]
        assert mapping.owners().tolist() == history.owners
    history.owners[0], history.owners[1] = history.owners[1], history.owners[0]
    history.changed |= {0, 1}
    history._commit("delta", [], [0, 1])
    other = _predictor(_Model(_hash(max_probe=1)), history)
    with pytest.raises(ModelMismatchError, match="max_probe=1"):
        other.sync()
    assert other.version == history.version - 1
    assert predictor.sync() == history.version


def _slots(model: Any, raw_ids: Tensor) -> Tensor:
    """Return the row that each raw id reads in a model, -1 for none."""
    features = {"f": JaggedTensor(raw_ids, lengths=torch.ones(len(raw_ids), dtype=torch.int64))}
    found = _collision(model)(features)["f"]
    return torch.full(raw_ids.shape, -1).masked_scatter(found.lengths() > 0, found.values())


_NUM_HISTORIES = 20 if SWEEPS_ARE_WHOLE else 1


@pytest.mark.sweep("long")
@pytest.mark.parametrize("seed", range(_NUM_HISTORIES))
@pytest.mark.parametrize(
    "kind", ["sorted", "bag", "quantized", "hash"] if SWEEPS_ARE_WHOLE else ["sorted", "quantized", "hash"]
)
def test_lookups_at_each_release_of_the_lock(kind: str, seed: int) -> None:
    """Also after failed attempts, resyncs, rollbacks and restarts, and of merged versions."""
    is_hash = kind == "hash"
    hash_size = 100 if is_hash else None
    history = History(
        seed,
        2 if is_hash else None,
        num_rows=8,
        hash_size=hash_size,
        has_defaults=not is_hash,
        is_small=is_hash,  # an unsharded hash module does not accept others
    )
    size = history.hash_size

    def model() -> nn.Module:
        if kind == "quantized":
            return _quantized(history)
        return _Model(_hash() if is_hash else _mch(8, size), is_bag=kind != "sorted")

    table = {"sorted": "mc._embedding_module.embeddings.t", "quantized": "mc.embeddings.t"}
    name = table.get(kind, "mc._embedding_module.embedding_bags.t")

    def new(of: History) -> ModelFollower:
        return ModelFollower(
            of,
            model=model,
            table=name,
            raw_id_map=lambda found: raw_id_maps(found)[name][0],
            slots=_slots,
            is_quantized=kind == "quantized",
        )

    schedule = Schedule(history, new)
    if is_hash:  # its buckets are those of the module
        schedule.restart = lambda: history.restart(2)  # type: ignore[method-assign]
    schedule.run(20)
    assert schedule.follower.num_checks > 0


class _Lookups(nn.Module):
    """Model whose input TorchRec's tracer can pass on."""

    def __init__(self, model: _Model) -> None:
        super().__init__()
        self.mc = model.mc

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found, _ = self.mc(features)
        return found["f"].values()


_Lookups.forward.__annotations__.update({"features": KeyedJaggedTensor, "return": Tensor})  # TorchScript needs types


@pytest.mark.advice("ModelMismatchError: check_hidden")
@pytest.mark.parametrize("is_hash", [False, True])
@pytest.mark.parametrize("is_scripted", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
def test_traced_and_scripted_models_are_refused(is_hash: bool, is_scripted: bool, has_index: bool) -> None:
    """Also with an index, which would not change what the model itself reads."""
    history = History(0, 2, num_rows=8, hash_size=100, has_defaults=not is_hash)
    plain = _Lookups(_Model(_hash() if is_hash else _mch(8, 100)))
    model: nn.Module = plain
    model = torch.fx.GraphModule(model, Tracer().trace(model))
    if is_scripted:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            model = torch.jit.script(model)
    name = "mc._embedding_module.embeddings.t"
    raw_ids = {FQN: RawIdIndex(8)} if has_index else {}
    predictor = Predictor(ModelTarget(model, names={FQN: name}, dense=False, raw_ids=raw_ids), history.storage)
    with pytest.raises(ModelMismatchError, match=r"modules\.t\..* scripted or traced.*Pass the model as it was before"):
        predictor.sync()
    assert predictor.version is None
    if not (is_hash or has_index):
        Predictor(ModelTarget(plain, names={FQN: name}, dense=False), history.storage).sync()


def test_a_traced_model_with_a_collection_as_a_leaf() -> None:
    history = _history(2)
    model = _Model(_mch(history.num_rows, history.hash_size))
    lookups = _Lookups(model)
    tracer = Tracer(leaf_modules=["ManagedCollisionEmbeddingCollection"])
    traced = torch.fx.GraphModule(lookups, tracer.trace(lookups))
    _predictor(traced, history).sync()
    _assert_answers(model, history)


def test_a_hash_module_returns_the_rows_of_raw_ids() -> None:
    mapping = HashMap(_hash(), 1)
    mapping.memory[[1, 3], 0] = torch.tensor([9, 4])
    assert mapping.slots_of(torch.tensor([4, 9, 4, 5, 2**62, -1, NO_OWNER])).tolist() == [3, 1, 3, -1, -1, -1, -1]
    assert mapping.slots_of(torch.empty(0, dtype=torch.int64)).tolist() == []
