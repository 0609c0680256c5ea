"""Names in use: each belongs to one object of a role, also when threads take them at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from delta_tracker.monitor.label_names import LabelNames


def test_a_name_in_use_is_numbered_and_free_again_after_its_release() -> None:
    names = LabelNames()
    assert [names.take("a", "x"), names.take("a", "x"), names.take("a", "x-2"), names.take("b", "x")] == [
        "x",
        "x-2",
        "x-2-2",
        "x",
    ]
    names.release("a", "x")
    names.release("a", "never taken")
    assert [names.take("a", "x"), names.take("a", "x")] == ["x", "x-3"]


def test_threads_take_different_names() -> None:
    names = LabelNames()
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: names.take("a", "x"), range(200)))
    assert len(set(taken)) == 200
