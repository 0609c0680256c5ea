"""A black-box world: random histories of a trainer, stores, mirrors and predictors, with slow references."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

import delta_tracker
from tests.interpreter import Interpreter, interpreter
from tests.simulation.disk import FAULTS
from tests.simulation.shrink import shrink
from tests.simulation.values import INSERTED, LESSER, WEIGHTS, Operation, Schedule, generate, operations
from tests.sweeps import SWEEPS_ARE_WHOLE

_ROOT = Path(__file__).parents[2]
# One pass of retention: the publisher's own passes come after 16 versions.
_UNADVERTISED = {
    "delta_tracker.stream.maintenance.retention.retain",
    "delta_tracker.stream.format.part_writer",  # a size from which parts are written in another way
}
_PACKAGES = (
    "delta_tracker.compat.",
    "delta_tracker.errors.",
    "delta_tracker.integrations.",
    "delta_tracker.monitor.",
    "delta_tracker.stream.storage.store.",
)


_PLAIN = replace(
    generate(0),
    states=False,
    encoding=None,
    has_web=False,
    has_upkeep=False,
    has_raw_ids=False,
    ranks=1,
    has_roles=False,
    lesser=None,
    has_previous=False,
    has_replicas=False,
)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Interpreter]:
    """Programs with the clock of a world, which must be installed before the library is imported."""
    with interpreter("tests.simulation.__main__") as each:
        yield each


def run_worlds(worlds: Interpreter, *arguments: str) -> str:
    """Run ``python -m tests.simulation`` with arguments, and return the last line of its output."""
    said = worlds.run(f"from tests.simulation.__main__ import main\nassert main({[*arguments]}) == 0")
    return said.splitlines()[-1]


def replay(worlds: Interpreter, folder: Path, schedule: Schedule, texts: str) -> str:
    """Run operations with the settings of a schedule, which break no rule; return the output."""
    file = folder / "schedule.json"
    file.write_text(schedule.with_operations(operations(texts.split(", "))).to_json())
    return worlds.run(f"from tests.simulation.__main__ import main\nassert main(['--replay', {str(file)!r}]) == 0")


def counts_of(worlds: Interpreter, *arguments: str) -> dict[str, Any]:
    """Run worlds, and return the counts that are their last line."""
    found: dict[str, Any] = json.loads(run_worlds(worlds, *arguments))
    return found


@pytest.mark.sweep("short")
@pytest.mark.promise("equal")
@pytest.mark.timeout(600)
def test_random_worlds_break_no_rule_but_the_known_ones(worlds: Interpreter) -> None:
    count = 60 if SWEEPS_ARE_WHOLE else 30  # which find the faults of tests/reverts/simulation.py
    seen = counts_of(worlds, "--known", "--stop", "--plain", "--seeds", str(count))
    assert seen["schedules"] == count
    assert seen["known_but_not_found"] == []
    assert seen["faults"], "no operation failed in the middle of a call"


@pytest.mark.timeout(600)
def test_random_worlds_of_ranks_and_object_stores_break_no_rule(worlds: Interpreter) -> None:
    assert counts_of(worlds, "--stop", "--seeds", "10")["schedules"] == 10


def test_a_seed_gives_the_same_run_in_any_process(worlds: Interpreter) -> None:
    first = [counts_of(worlds, "--seed", str(seed), "--seeds", "1")["turns"] for seed in (13, 15)]
    assert counts_of(worlds, "--seed", "12", "--seeds", "4")["turns"] > sum(first)
    assert [counts_of(worlds, "--seed", str(seed), "--seeds", "1")["turns"] for seed in (13, 15)] == first


# Each kind of actor, and the advice of what it is refused.
_ACTORS = (
    "publish 0 0, join 0 0, join 0 0, publish 0 0, mirror 0 0, advised 0 0, publish 0 0, mirror 0 5, follow 0 0, "
    "sync 1 0, compact 0 1, advised 0 0, pin 0 0, advised 0 0, snapshot 0 0, release_pin 0 0, stand_by 0 0, "
    "publish 0 0, take_over 0 1, publish 0 0, retain 0 0, advised 0 0, restart_trainer 0 1, publish 0 0, advance 0 4, "
    "settle 0 0"
)


@pytest.mark.parametrize("lesser", [None, *LESSER])
def test_an_actor_with_the_permissions_of_its_role_is_refused_nothing(
    worlds: Interpreter, lesser: str | None, tmp_path: Path
) -> None:
    made = replace(_PLAIN, states=True, has_buckets=True, has_roles=True, has_upkeep=lesser == "upkeep", lesser=lesser)
    said = replay(worlds, tmp_path, made, _ACTORS)
    is_refused = lesser not in (None, "heartbeats")  # a predictor follows without heartbeats
    assert ("Permission denied" in said, "grant 0 0: granted" in said) == (is_refused, is_refused)


def test_a_missing_permission_is_found(worlds: Interpreter) -> None:
    made = replace(_PLAIN, has_buckets=True, has_roles=True).with_operations(operations(["publish 0 0"]))
    program = f"""
        from tests.simulation.roles import table
        from tests.simulation.values import Schedule
        from tests.simulation.world import run
        table()["publisher"]["create"].remove("parts")
        print([each.text for each in run(Schedule.from_json({made.to_json()!r}))])
    """
    assert "publisher is refused: create parts/" in worlds.run(textwrap.dedent(program))


def test_the_previous_release_reads_and_begins_a_world(worlds: Interpreter, tmp_path: Path) -> None:
    made = replace(_PLAIN, states=True, has_previous=True)
    texts = "begin_previous 0 7, join 0 0, publish 0 0, sync 0 0, mirror 0 0, read_previous 0 0"
    said = replay(worlds, tmp_path, made, texts)
    if "nothing is read by the previous release" in said:
        pytest.skip(said.splitlines()[0])
    assert "the previous release publishes up to 4, restored version 4" in said
    assert len(re.findall("previous.*: version [0-9]+ of [ab]", said)) == 3


def test_a_world_without_the_previous_release_says_so(worlds: Interpreter) -> None:
    made = replace(_PLAIN, has_previous=True).with_operations(operations(["publish 0 0", "read_previous 0 0"]))
    program = f"""
        from tests.releases import release
        from tests.simulation.values import Schedule
        from tests.simulation.world import run
        release.COMMIT = 40 * "0"
        assert not run(Schedule.from_json({made.to_json()!r}))
    """
    assert "nothing is read by the previous release: " in worlds.run(textwrap.dedent(program))


def test_threads_that_wait_for_each_other_are_found(worlds: Interpreter) -> None:
    program = """
        import threading
        from tests.simulation.threads import SCHEDULER, DeadlockError
        SCHEDULER.restart(0)
        first, second = threading.Lock(), threading.Lock()
        def take(one, other):
            with one:
                SCHEDULER.sleep(1)
                with other:
                    pass
        both = [threading.Thread(target=take, args=each, daemon=True) for each in ((first, second), (second, first))]
        for each in both:
            each.start()
        try:
            both[0].join()
        except DeadlockError as error:
            print(error)
    """
    assert "all threads wait for each other" in worlds.run(textwrap.dedent(program))


@pytest.mark.sweep("long", only=True)
@pytest.mark.timeout(1800)
def test_many_random_worlds_break_no_rule_but_the_known_ones(worlds: Interpreter) -> None:
    seen = counts_of(worlds, "--shrinks", "0", "--seed", "1000", "--seeds", "400")
    assert seen["schedules"] == 400
    assert seen["faults"].keys() == set(FAULTS)


@pytest.mark.parametrize(
    ("texts", "settings"),
    [
        pytest.param(
            "publish 0 0, join 0 4492, publish 0 0, publish 0 0, compact 0 0, retain 0 0, pin 0 0",
            {"has_web": True},
            id="only a merged snapshot leads to a pin, over http",
        ),
        pytest.param(
            "publish 0 0, join 0 8157, publish 0 0, publish 0 0, compact 0 0, publish 0 0, pin 0 0, snapshot 0 0, "
            "retain 0 0, settle 0 0",
            {"has_web": True},
            id="a merged snapshot below the newest snapshot leads a canary, over http",
        ),
        pytest.param(
            "publish 0 0, join 0 1, sync 0 0, mirror 1 0, snapshot 0 0, mirror 0 0, lose 0 0, promote 1 0",
            {"has_web": True},
            id="a promotion before the first entry of a mirror over http",
        ),
        pytest.param(
            "join 0 17751, publish 0 0, spoil 2 0, mirror 0 0, publish 0 0, promote 0 1815",
            {"states": True, "has_upkeep": True},
            id="a former stream ends with a version that a gate holds",
        ),
        pytest.param(
            "publish 0 0, join 0 5147, publish 0 17270, publish 0 0, publish 0 0, sync 0 0, publish 0 0, mirror 0 0, "
            "sync 0 0, pin 0 0, roll_back 0 12632, settle 0 0",
            {"has_upkeep": True},
            id="a pin that a canary does not allow yet ends an own rollback",
        ),
        pytest.param(
            "publish 0 0, mirror 0 0, join 0 9928, spoil 4 0, publish 0 0, promote 0 17911",
            {"states": True},
            id="a gate holds the last version of a former stream, which can still be read",
        ),
        pytest.param(
            "publish 0 0, join 0 13149, publish 0 0, fail 0 0, publish 0 0, repair 0 0, publish 0 10148, publish 0 0, "
            "damage 0 15577, pin 0 3648, settle 0 0, pin 3 0",
            {"seed": 11446, "encoding": "F16", "has_upkeep": True},
            id="only a merged snapshot leads to a pin past a damaged version",
        ),
        pytest.param(
            "publish 0 0, mirror 0 0, burst 0 0, pin 0 3058, join 0 7053, sync 0 0, promote 0 19471, publish 0 0, "
            "snapshot 0 0, publish 0 0, pin 0 0, pin 1 0",
            {"seed": 30016, "has_upkeep": True},
            id="a pin of the next stream is newer than that of the former one",
        ),
        pytest.param(
            "join 0 12395, publish 0 8704, sync 0 0, interrupt 0 1757, settle 0 0",
            {"encoding": "INT8", "has_raw_ids": True},
            id="a row store fails after it has a version, and a restart finds an empty url first",
        ),
        pytest.param(
            "join 0 45, burst 0 0, snapshot 0 0, sync 0 0, pin 0 0, roll_back 0 17873",
            {"states": True, "has_web": True, "has_raw_ids": True},
            id="an own rollback overrules a pin that a cache does not show yet",
        ),
        pytest.param(
            "publish 0 0, join 0 11413, publish 0 0, sync 0 8062, snapshot 0 0, damage 0 12695, publish 0 15279, "
            "snapshot 0 0, interrupt 0 4152",
            {"seed": 6005867},
            id="a row store states that it has a part of a later version",
        ),
        pytest.param(
            "publish 0 0, mirror 3 0, mirror 0 0, lose 0 0, promote 0 0, publish 0 0, settle 0 0, damage 2 0, "
            "lose 0 0, promote 0 0",
            {"seed": 9000244, "encoding": "INT8", "has_raw_ids": True},
            id="a mirror is promoted whose newest snapshot has lost its part",
        ),
        pytest.param(
            "publish 0 0, mirror 0 0, publish 0 0, publish 0 0, compact 0 0, restart_trainer 0 17401, publish 0 0, "
            "retain 0 0",
            {"seed": 9200192, "states": True, "has_upkeep": True},
            id="a mirror starts at a merged snapshot that ends before a claim",
        ),
        pytest.param(
            "publish 0 0, mirror 0 0, join 0 15584, publish 0 0, publish 0 0, publish 0 0, publish 0 0, pin 0 3449, "
            "settle 0 0, mirror 1 0, promote 1 10967, snapshot 0 0, settle 0 0, lose 0 0, promote 0 0, burst 0 0, "
            "pin 0 0",
            {"seed": 9300419, "has_raw_ids": True},
            id="the pins of a log that was made again at its url count from 1",
        ),
        pytest.param(
            "publish 0 0, mirror 0 0, join 0 4247, publish 0 0, snapshot 0 0, pin 0 7947, settle 0 0, sync 0 0, "
            "lose 0 0, promote 0 0, publish 0 0, pin 0 0, settle 0 0",
            {"seed": 451, "states": True, "has_upkeep": True},
            id="a canary at a pin does not allow the pin of the next stream yet",
        ),
        pytest.param(
            "publish 0 0, join 0 0, sync 0 0, join 0 82, restart 1 0, spoil_copy 1 1, follow 1 0",
            {"seed": 14000000, "encoding": "F16", "has_web": True, "ranks": 3},
            id="the first url has no stream yet, and a cache has a damaged copy of the second one",
        ),
        pytest.param(
            "join 0 0, publish 0 0, spoil_copy 0 0, spoil_copy 0 0, follow 0 0, slow 0 19661, sync 0 0, sync 0 0, "
            "sync 0 0, sync 0 0, forge 0 10219, sync 0 0, spoil_copy 0 0",
            {"seed": 21000021, "states": True, "has_web": True, "has_buckets": True, "ranks": 4},
            id="a cache gets a damaged copy of an object that was read past it before",
        ),
        pytest.param(
            "join 0 5140, publish 0 0, publish 0 0, publish 0 0, sync 0 0, restart 0 18866, publish 0 0, publish 0 0, "
            "spoil_copy 3 17572, pin 0 0",
            {"seed": 25000098, "encoding": "INT8", "has_web": True},
            id="a fault of the first url is believed, and a cache has a damaged copy of the second one",
        ),
        pytest.param(
            "join 0 3864, publish 0 0, follow 0 0, sync 0 0, sync 0 0, sync 0 0, publish 0 0, spoil_copy 0 0, "
            "spoil_copy 0 0, publish 0 0, compact 0 0, spoil_copy 0 0, publish 0 0, publish 0 0, spoil_copy 0 0, "
            "snapshot 0 0, publish 0 0, pin 0 15799, retain 0 0",
            {"seed": 27000118, "states": True, "has_web": True, "has_raw_ids": True},
            id="a cache has a damaged copy of the merged snapshot that leads to a pin",
        ),
        pytest.param(
            "publish 0 0, mirror 0 0, join 0 755, mirror 3 0, publish 0 0, promote_lagging 3 0, sync 0 0, "
            "snapshot 0 0, settle 3 0, advised 0 0",
            {"seed": 28000014, "states": True, "has_web": True, "has_buckets": True, "ranks": 2},
            id="the first url was emptied, over http",
        ),
        pytest.param(
            "publish 0 0, mirror 0 0, join 0 6979, lose 0 0, promote 0 0, snapshot 0 0, follow 0 0, mirror 0 0, "
            "settle 0 0, publish 0 0, pin 0 2716, publish 0 0, mirror 0 0, restart 0 0, sync 0 0, sync 0 0, lose 0 0, "
            "promote 0 0, spoil_copy 3 9411",
            {"seed": 2026112836, "states": True, "has_web": True},
            id="a cache has a damaged copy of the claim that proves a succession",
        ),
        pytest.param(
            "publish 0 0, join 0 9, publish 0 0, pin 0 17881, settle 0 0, spoil_copy 0 0, restart 0 0, sync 0 4175",
            {"seed": 14000056, "states": True, "has_web": True, "ranks": 3},
            id="a cache has a malformed copy of a pin",
        ),
        pytest.param(
            "publish 0 0, publish 0 0, publish 0 0, compact 0 0, pin 0 0, snapshot 0 0, retain 0 0",
            {"seed": 94},
            id="a merged snapshot leads to a pin, which retention keeps",
        ),
        pytest.param(
            "join 0 4311, publish 0 0, damage 0 0, snapshot 0 0, settle 0 0",
            {"seed": 12000002, "encoding": "INT8", "has_upkeep": True, "has_buckets": True, "ranks": 2},
            id="nothing leads a host cache to a version of which a part is lost",
        ),
        pytest.param(
            "join 0 3817, publish 0 0, mirror 0 0, publish 0 0, promote_lagging 0 10769, restart 0 0, snapshot 0 0, "
            "sync 0 0, mirror 0 0, publish 0 0, promote_lagging 0 0, sync 0 0",
            {"seed": 31000444, "states": True, "has_upkeep": True, "has_buckets": False, "ranks": 3},
            id="the directory of the own stream is unmounted, and that of a former one is mounted again",
        ),
        pytest.param(
            "join 0 13546, sync 0 0, advised 0 0, snapshot 0 0, back_up 0 0, publish 0 0, publish 0 0, sync 0 0, "
            "return_backup 0 0, settle 0 0",
            {"seed": 32000579, "states": True},
            id="a canary of seconds has seen the version that an older copy lacks",
        ),
        pytest.param(
            "publish 0 0, join 0 90, slow 0 1, follow 0 0, advance 0 2, advance 0 2, restart 0 0",
            {"has_buckets": True},
            id="a fetch into a host cache is interrupted, and then the deletion of its draft",
        ),
        pytest.param(
            "join 0 2370, join 0 0, join 0 0, sync 0 0, advised 0 0, mirror 1 0, publish 0 0, promote_lagging 0 9688, "
            "publish 0 0, advance 0 6803, mirror 3 0, publish 0 0, sync 0 0, promote_lagging 0 0, restart 0 15848, "
            "sync 0 0",
            {"seed": 41000524, "states": True, "has_buckets": False, "ranks": 2},
            id="a predictor restarts while the directory of its stream is unmounted",
        ),
        pytest.param(
            "publish 0 0, publish 0 0, pin 0 0, join 0 50682",
            {},
            id="a predictor of some tables begins at a pin",
        ),
        pytest.param(
            "publish 0 0, join 0 18900, sync 0 0, choose 0 0, publish 0 0, sync 0 0, choose 0 1, restart 0 1, "
            "settle 0 0",
            {},
            id="a predictor chooses other tables",
        ),
        pytest.param(
            "publish 0 0, join 0 18972, sync 0 0, choose 0 0, publish 0 0, sync 0 0, restart 0 1, settle 0 0",
            {},
            id="a row store is opened with another choice of tables",
        ),
        pytest.param(
            "publish 0 0, mirror 3 0, join 0 3864, mirror 0 0, publish 0 0, promote_lagging 0 0, snapshot 0 0, "
            "settle 0 0, advised 0 0, interrupt 0 1480",
            {"seed": 72000079, "states": True, "has_raw_ids": True, "has_buckets": False, "has_upkeep": False},
            id="a copy of the own stream is emptied, and a former one ends at the same time",
        ),
        pytest.param(
            "publish 0 0, mirror 1 0, join 0 75, join 0 0, publish 0 0, publish 0 0, join 0 0, publish 0 0, join 0 0, "
            "restart 0 0, publish 0 0, sync 0 0, interrupt 0 14901, roll_back 0 0, advised 0 0",
            {"seed": 72000100, "states": True, "has_raw_ids": True, "has_buckets": True, "has_upkeep": False},
            id="a version to roll back to is at the second url only",
        ),
        pytest.param(
            "join 0 11856, publish 0 0, advance 0 7419, publish 0 0, mirror 0 0, publish 0 0, promote_lagging 0 0, "
            "snapshot 0 0, settle 0 0, publish 0 0, mirror 0 0, restart 0 0, settle 0 0, spoil_copy 3 18065, "
            "join 0 61167, settle 0 0",
            {"seed": 72100775, "has_web": True, "ranks": 3},
            id="a cache has a damaged copy of the snapshot of the stream that continues the own one at rest",
        ),
        pytest.param(
            "join 0 13153, slow 2 9999, publish 0 0, join 0 712, slow 1 7571, sync 0 0, publish 0 0, sync 1 0, "
            "snapshot 0 0, mirror 0 0, publish 0 0, sync 0 0, promote_lagging 0 0, settle 0 0, spoil_copy 3 18591, "
            "lose 0 0",
            {"seed": 73000045, "has_web": True, "has_buckets": True, "ranks": 2},
            id="a cache has a damaged copy of the newest entry, which a canary needs",
        ),
        pytest.param(
            "publish 0 0, join 0 56700, sync 0 0, change_model 0 9, publish 0 0, change_model 0 0",
            {},
            id="a chosen table is removed, and then added again",
        ),
        pytest.param(
            "publish 0 0, mirror 0 0, change_model 0 0, publish 0 0, promote_lagging 0 1, change_model 0 12, "
            "snapshot 0 0, join 0 1",
            {},
            id="the former stream at the first url ends with other tables",
        ),
        pytest.param(
            "publish 0 0, join 0 0, join 0 75600, sync 0 0, sync 1 0, change_model 0 0, publish 0 0, publish 0 1, "
            "sync 0 0, sync 1 0, change_served 0 0, change_served 1 1, settle 0 0, change_model 0 1, publish 0 0, "
            "sync 0 0, change_model 0 2, publish 0 0, join 0 72, sync 1 0, sync 2 0, change_model 0 0, publish 0 0, "
            "sync 2 0, sync 1 0, change_served 1 0",
            {"states": True},
            id="trainers, predictors and a row store change their tables",
        ),
        pytest.param(
            "publish 0 0, join 0 234822, change_model 0 7015, publish 0 0, publish 0 0, snapshot 0 0, publish "
            "0 0, pin 0 0, change_model 0 14593, sync 0 0, change_served 0 0, snapshot 0 0, release_pin 0 0, "
            "sync 0 0",
            {"states": True, "has_buckets": True},
            id="a canary with another model serves no version before it may apply a snapshot",
        ),
        pytest.param(
            "join 0 15177, publish 0 0, follow 0 0, mirror 0 0, mirror 3 0, publish 0 0, promote_lagging 0 0, "
            "snapshot 0 0, settle 0 0, advised 0 0",
            {"seed": 58000058, "states": True, "has_web": True, "has_buckets": True, "ranks": 2},
            id="a former stream ends in the second in which the stream of a predictor begins",
        ),
        pytest.param(
            "join 0 87551, burst 0 0, mirror 0 0, publish 0 0, publish 0 0, publish 0 0, mirror 1 0, sync 0 0, "
            "lose 0 0, promote 1 0, change_model 0 0, lose 0 0, change_served 0 0",
            {"seed": 58000224, "encoding": "INT8"},
            id="a predictor with new tables does not begin at an older copy than its saved position",
        ),
        pytest.param(
            "publish 0 0, join 0 0, join 0 54, join 0 72, sync 0 0, sync 1 0, sync 2 0, restart_trainer 0 1, "
            "publish 0 1, stand_by 0 0, publish 0 2, take_over 0 1, publish 0 3, sync 0 0, sync 1 0, sync 2 0",
            {"states": True, "has_raw_ids": True, "ranks": 4},
            id="four ranks train a table of raw ids, are restored and replaced",
        ),
        pytest.param(
            "publish 0 0, join 0 0, sync 0 0, average 0 1, publish 0 1, sync 0 0, train 0 0, average 0 0, publish 0 2, "
            "sync 0 0, burst 0 3, restart_trainer 0 2, publish 0 4, average 0 2, publish 0 5, sync 0 0, snapshot 0 0",
            {"ranks": 4, "has_replicas": True},
            id="four ranks train replicas, which are averaged between versions",
        ),
    ],
)
def test_a_schedule_that_broke_a_rule_breaks_none(
    worlds: Interpreter, texts: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    replay(worlds, tmp_path, replace(_PLAIN, **settings), texts)


def test_a_schedule_is_its_text() -> None:
    for seed in range(20):
        schedule = generate(seed)
        assert schedule == generate(seed)
        assert Schedule.from_json(schedule.to_json()) == schedule


def test_plain_schedules_do_not_change() -> None:
    """The numbers of operations after which a fault is found are those of these schedules."""
    text = "".join(generate(seed, is_plain=True).to_json() for seed in range(50))
    assert xxhash.xxh3_64_hexdigest(text.encode()) == "a71c8010c1e32f26"


def test_every_kind_of_operation_is_generated() -> None:
    kinds = {operation.kind for seed in range(100) for operation in generate(seed).operations}
    assert kinds == WEIGHTS.keys() | INSERTED


def test_a_minimised_schedule_has_only_the_operations_that_are_needed() -> None:
    schedule = generate(7)
    needed = [Operation("lose", 1, 5), Operation("promote", 2, 3), Operation("lose", 3, 4)]
    operations = list(schedule.operations)
    for number, operation in enumerate(needed):
        operations.insert(3 + 5 * number, operation)

    def has_all(tried: Schedule) -> bool:
        rest = iter(tried.operations)
        return all(any(each.kind == one.kind and each.choice >= one.choice for each in rest) for one in needed)

    small = shrink(schedule.with_operations(operations), has_all)
    assert [operation.kind for operation in small.operations] == ["lose", "promote", "lose"]


def _imports(tree: ast.AST) -> Iterator[str]:
    """Yield the names of the library that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)


@pytest.mark.parametrize("path", sorted((_ROOT / "tests" / "simulation").glob("*.py")), ids=lambda path: path.name)
def test_a_world_uses_public_names_only(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    public = {"delta_tracker", *(f"delta_tracker.{name}" for name in delta_tracker.__all__), *_UNADVERTISED}
    imported = {name for name in _imports(tree) if name.startswith("delta_tracker")}
    assert {name for name in imported - public if not name.startswith(_PACKAGES)} == set()
    own = set(re.findall(r"def (_\w+)|^ +(?:self\.)?(_\w+)(?::.*)? =|self\.(_\w+)", text, re.MULTILINE))
    private = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr)}
    # threads.py and ranks.py replace private parts of Python and torch
    own_names = {name for names in own for name in names}
    assert path.name in ("threads.py", "ranks.py") or private <= own_names
