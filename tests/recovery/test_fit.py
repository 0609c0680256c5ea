"""Versions that do not fit a job, each refused by name, and states that an object of another kind would accept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torchrec.optim.keyed import KeyedOptimizerWrapper

from delta_tracker.errors import InvalidArgumentError, RestoreMismatchError
from delta_tracker.recovery.job import Job, Saved, check_fit, check_objects
from delta_tracker.recovery.optimizer_parameters import Parameters
from delta_tracker.recovery.training_states import DATA, TrainingStates
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, DenseSpec, Part
from delta_tracker.stream.format.shard_rows import wanted
from delta_tracker.stream.format.state_tree import pack
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec, StateSpec, TableSpec, TableStates
from tests.stream.streams import Writer

_FUSED = TableSpec("fused", 10, 8, torch.float32)
_PLAIN = TableSpec("plain", 6, 4, torch.float32)
_SUM = StateSpec("momentum1", torch.float32, "range")
_SQUARES = StateSpec("momentum1", torch.float32, "columns")
_STATES = TableStates("EXACT_ROWWISE_ADAGRAD", ((0, 4), (4, 8)), (_SUM,))
_WEIGHT = DenseSpec(torch.float32, (3, 1))

_SAVED = Saved(
    tables={"fused": _FUSED, "plain": _PLAIN},
    states={"fused": _STATES},
    unfused={"plain": ShardSpec(_PLAIN, 0, 3, ((0, 4),))},
    dense={"w": _WEIGHT},
    training=["optimizer"],
    rank=["random", DATA],
    world_size=2,
)
_JOB = Job(
    shards={"fused": ShardSpec(_FUSED, 0, 10, ((4, 8),)), "plain": ShardSpec(_PLAIN, 0, 3, ((0, 4),))},
    fused=["fused"],
    states={"fused": replace(_STATES, columns=((4, 8),))},
    dense={"w": _WEIGHT},
    training=["optimizer"],
    rank={"random": False, DATA: True},
    world_size=2,
)


def test_an_equal_job_fits() -> None:
    check_fit(_SAVED, _JOB)


def test_a_rank_without_rows_fits() -> None:
    shards = {"fused": ShardSpec(_FUSED), "plain": ShardSpec(_PLAIN)}
    saved = replace(_SAVED, unfused={"plain": ShardSpec(_PLAIN)})
    check_fit(saved, replace(_JOB, shards=shards, states={}))


def shard(fqn: str, **fields: Any) -> dict[str, Any]:
    return {"shards": {**_JOB.shards, fqn: replace(_JOB.shards[fqn], **fields)}}


_OTHER_OPTIMIZER = {"states": {"fused": replace(_STATES, optimizer="EXACT_ADAGRAD")}}


@pytest.mark.parametrize(
    ("saved", "job", "words"),
    [
        ({"tables": {"fused": _FUSED}}, {}, "tables that differ is [] in the version but ['plain'] in this"),
        ({}, shard("plain", table=TableSpec("plain", 7, 4, torch.float32)), "table 'plain' is 6 x 4 float32"),
        ({}, {"shards": {"fused": _JOB.shards["fused"]}}, "tables that differ is ['plain'] in the version but []"),
        (
            {},
            {"shards": {"fused": _JOB.shards["fused"], "new": ShardSpec(_PLAIN)}},
            "is ['plain'] in the version but ['new']",
        ),
        ({"states": {}}, {}, "the optimizer of 'fused' is not fused in the version but fused"),
        ({}, {"fused": []}, "the optimizer of 'fused' is fused in the version but not fused"),
        ({}, {"fused": ["fused", "plain"]}, "the optimizer of 'plain' is not fused in the version but fused"),
        (_OTHER_OPTIMIZER, {}, "'fused' is EXACT_ADAGRAD in the version but EXACT_ROWWISE_ADAGRAD"),
        ({"states": {"fused": replace(_STATES, states=(_SQUARES,))}}, {}, "momentum1 (torch.float32 per columns)"),
        ({"states": {"fused": replace(_STATES, states=())}}, {}, "is none in the version but momentum1"),
        ({"states": {"fused": replace(_STATES, columns=((0, 8),))}}, {}, "is [(0, 8)] in the version but [(4, 8)]"),
        ({}, shard("plain", is_replicated=True), "the sharding of 'plain' is sharded in the version but replicated"),
        (
            {},
            shard("plain", row_offset=3),
            "is the rows (0, 3) and columns [(0, 4)] in the version but the",
        ),
        ({"dense": {}}, {}, "the dense tensor 'w' is missing in the version"),
        ({}, {"dense": {}}, "the dense tensor 'w' is float32 [3, 1] in the version but missing"),
        ({}, {"dense": {"w": DenseSpec(torch.float32, (3,))}}, "but float32 [3] in this job"),
        (
            {"training": []},
            {},
            "is missing in the version but there in this job; nothing was restored. Name it in ignore={'optimizer'}.",
        ),
        ({}, {"training": []}, "nothing was restored. Pass it, or name it in ignore={'optimizer'}."),
        ({"rank": [DATA]}, {}, "rank_state['random'] is missing in the version"),
        ({}, {"rank": {"random": False}}, "data is there in the version but missing"),
        ({"rank": ["random"]}, {}, "data is missing in the version but there"),
        (
            {"world_size": 1},
            {},
            "that of a job with world size 1 in the version but needed for world size 2 in this job",
        ),
        ({"world_size": 3}, {}, "Name it in ignore={'random'}, and set it up anew, for example by a new seed"),
    ],
    ids=str,
)
def test_a_difference_is_refused_by_name(saved: dict[str, Any], job: dict[str, Any], words: str) -> None:
    with pytest.raises(RestoreMismatchError, match="nothing was restored") as caught:
        check_fit(replace(_SAVED, **saved), replace(_JOB, **job))
    assert words in str(caught.value)


def test_states_with_one_number_per_column_fit_other_column_ranges() -> None:
    saved = replace(_SAVED, states={"fused": replace(_STATES, columns=((0, 8),), states=(_SQUARES,))})
    check_fit(saved, replace(_JOB, states={"fused": replace(_STATES, states=(_SQUARES,))}))


def test_a_sharded_table_without_a_fused_optimizer_may_move_at_another_number_of_ranks() -> None:
    job = replace(_JOB, rank={"random": True, DATA: True}, world_size=4, **shard("plain", row_offset=3))
    check_fit(_SAVED, job)


def test_ignored_names_are_not_compared() -> None:
    saved = replace(_SAVED, tables={"fused": _FUSED}, dense={}, training=[], rank=[], world_size=3)
    check_fit(saved, _JOB, ["plain", "w", "optimizer", "random", DATA])
    with pytest.raises(InvalidArgumentError, match="optimiser"):
        check_fit(_SAVED, _JOB, ["optimiser"])


@pytest.mark.parametrize("seed", range(20))
def test_the_wanted_blocks_are_those_that_share_a_cell_with_the_shards(seed: int) -> None:
    draw = random.Random(seed)

    def area(end: int) -> tuple[int, int]:
        first = draw.randrange(end)
        return first, draw.randrange(first, end + 1)

    tables = [TableSpec(name, 8, 6, torch.float32) for name in "ab"]
    blocks = []
    for _ in range(20):
        rows, columns = area(8), area(6)
        if rows[0] < rows[1] and columns[0] < columns[1]:
            count = draw.choice([0, rows[1] - rows[0]])
            blocks.append(Block(draw.choice("abc"), rows, columns, count, "list", Encoding.F32))
    shards = {}
    for table in tables:
        first, end = area(8)
        columns = draw.choice([((0, 6),), ((0, 2), (4, 6)), ((3, 4),)])
        shards[table.fqn] = ShardSpec(table, first, end - first, columns) if first < end else ShardSpec(table)

    def cells(rows: tuple[int, int], ranges: tuple[tuple[int, int], ...]) -> set[tuple[int, int]]:
        return {(row, column) for row in range(*rows) for each in ranges for column in range(*each)}

    held = {
        fqn: cells((each.row_offset, each.row_offset + each.num_rows), each.columns) for fqn, each in shards.items()
    }
    expected = {
        number
        for number, block in enumerate(blocks)
        if block.num_rows and cells(block.rows, (block.columns,)) & held.get(block.table, set())
    }
    assert wanted(Part("parts/x.safetensors", 1, "0" * 32, tuple(blocks), ()), shards) == expected


_SUMS = TableStates("EXACT_TEST", ((0, 4),), (_SUM,))


def _layers(count: int = 2) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    for each in parameters:
        each.grad = torch.ones(2)
    return parameters


def _keyed(count: int = 2, *, saves: bool = True, steps: bool = True) -> KeyedOptimizerWrapper:
    named = {f"layer{number}": each for number, each in enumerate(_layers(count))}
    optimizer = KeyedOptimizerWrapper(named, lambda these: optim.Adam(these, lr=0.1))
    optimizer.save_param_groups(saves)
    if steps:
        optimizer.step()
    return optimizer


def _adam(count: int = 2, *, steps: bool = False) -> optim.Adam:
    optimizer = optim.Adam(_layers(count))
    if steps:
        optimizer.step()
    return optimizer


def _groups(*counts: int) -> optim.Adam:
    return optim.Adam([{"params": _layers(count)} for count in counts])


def _check(saved: Any, found: Any) -> None:
    writer = Writer(Storage("memory://"), states=_SUMS)
    state = saved if isinstance(saved, int | list) else saved.state_dict()
    writer.training.append(pack({"library": {}, "training": {"each": state}}, "state"))
    check_objects(
        "training_state", {"each": found}, TrainingStates(writer.storage, writer.snapshot()), 0, [], Parameters()
    )


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        (lambda: _adam(steps=True), _adam),
        (lambda: optim.Adam(_layers(), lr=0.5, amsgrad=True), _adam),
        (_keyed, _keyed),
        (lambda: StepLR(_adam(), 2), lambda: StepLR(_adam(), 3)),
        (lambda: StepLR(_adam(), 2).optimizer, _adam),  # the scheduler has added a key
        (_adam, lambda: StepLR(_adam(), 2).optimizer),
        (lambda: optim.AdamW(_layers()), lambda: optim.AdamW(_layers(), lr=0.1)),
        (lambda: 3, lambda: torch.amp.GradScaler("cpu")),
    ],
)
def test_the_state_of_an_equal_object_fits(saved: Callable[[], Any], found: Callable[[], Any]) -> None:
    _check(saved(), found())


@pytest.mark.parametrize(
    ("saved", "found", "words"),
    [
        (_adam, lambda: optim.SGD(_layers()), r"keys that differ in param_groups\[0\] of .* is .*'betas'.*'momentum'"),
        (_adam, lambda: optim.RAdam(_layers()), r"is \['amsgrad', 'fused'\] in the version but \[\]"),
        (_adam, lambda: optim.AdamW(_layers()), r"decoupled_weight_decay in .* is False in the version but True"),
        (
            _adam,
            lambda: _groups(1, 1),
            r"parameters of each group .* is \[\[0, 1\]\] in the version but \[\[0\], \[1\]\]",
        ),
        (_adam, lambda: _adam(3), r"is \[\[0, 1\]\] in the version but \[\[0, 1, 2\]\]"),
        (lambda: StepLR(_adam(), 2), _adam, r"one, with the keys \['step_size'.* an optimizer \(Adam\)"),
        (
            _adam,
            lambda: StepLR(_adam(), 2),
            r"a StepLR, is \['param_groups', 'state'\] in the version but \['base_lrs'",
        ),
        (lambda: CosineAnnealingLR(_adam(), 2), lambda: StepLR(_adam(), 2), r"'T_max'.*'step_size'"),
        (lambda: 3, _adam, r"another one, with the keys none,"),
        (lambda: [{}], lambda: StepLR(_adam(), 2), r"is \[\] in the version but \['base_lrs'"),
        (lambda: _keyed(2), lambda: _keyed(3), r"parameters with a state .* is \['layer0', 'layer1'\] in the version"),
        (_keyed, lambda: _keyed(steps=False), r"is \['layer0', 'layer1'\] in the version but \[\]"),
        (_keyed, _adam, r"parameters of each group .*'layer0'.*\[\[0, 1\]\]"),
    ],
)
def test_the_state_of_another_object_is_refused(saved: Callable[[], Any], found: Callable[[], Any], words: str) -> None:
    with pytest.raises(RestoreMismatchError, match=words) as caught:
        _check(saved(), found())
    assert "training_state['each']" in str(caught.value)


def test_an_optimizer_that_does_not_load_its_groups_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"training_state\['each'\].*save_param_groups"):
        _check(_keyed(), _keyed(saves=False))
