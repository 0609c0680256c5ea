"""Names that differ between a stream and a model: whole names, prefixes and functions."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, Storage
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.predictor.served_model import NameMap


def _model(name: str, *, wraps: bool = False) -> nn.Module:
    model = nn.ModuleDict({name: nn.ModuleDict({"user": nn.Embedding(9, 2), "item": nn.Embedding(5, 2)})})
    model["over"] = nn.Linear(2, 1)
    return nn.ModuleDict({"module": model}) if wraps else model


@pytest.mark.parametrize(
    ("served", "names"),
    [
        (_model("tables"), {"towers.": "tables."}),
        (_model("towers", wraps=True), {"": "module."}),
        (_model("tables", wraps=True), {"": "module.", "towers.": "module.tables."}),
        (_model("tables"), {"towers.user": "tables.user", "towers.": "tables."}),
        (_model("tables"), lambda name: name.replace("towers", "tables")),
    ],
)
def test_tables_and_dense_tensors_are_found(served: nn.Module, names: object) -> None:
    trained, stream = _model("towers"), Storage("memory://")
    with Publisher(ModelDeltaTracker(trained), stream, dense=trained) as publisher:
        publisher.snapshot()
    Predictor(ModelTarget(served, names=names), stream).sync()  # type: ignore[arg-type]
    for mine, its in zip(trained.parameters(), served.parameters(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"towers.": "tables."}, "names='tables.'.*'user'"),
        ({"towers": "tables"}, "names='tables'"),
        ({"a": 3}, "names=.*Pass strings"),
        (3, "names=3.*a mapping of name in the stream to name in the model, or a function"),
    ],
)
def test_what_matches_nothing_is_refused(names: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Predictor(ModelTarget({"user": torch.zeros(9, 2)}, names=names), Storage("memory://"))  # type: ignore[arg-type]


def test_a_function_returns_names() -> None:
    with pytest.raises(InvalidArgumentError, match=r"names=None.*Return a name in the model for 'user'"):
        NameMap(lambda _: None, ()).of(["user"])


_PARTS = st.lists(st.sampled_from(["a", "b", "ab", "t"]), min_size=1, max_size=3).map(".".join)


@given(
    whole=st.dictionaries(_PARTS, _PARTS, max_size=3),
    prefixes=st.dictionaries(_PARTS, _PARTS, max_size=3),
    names=st.lists(_PARTS),
)
@settings(max_examples=100, deadline=None)
def test_the_longest_rule_wins(whole: dict[str, str], prefixes: dict[str, str], names: list[str]) -> None:
    rules = {f"{name}.": f"{own}." for name, own in prefixes.items()}
    given_rules = list({**whole, **rules}.items())
    random.Random(0).shuffle(given_rules)
    known = {*whole.values(), *(f"{own}x" for own in rules.values())}
    found = NameMap(dict(given_rules), known).of(names)
    for name in names:
        beginnings = [rule for rule in rules if name.startswith(rule)]
        longest = max(beginnings, key=len, default="")
        expected = rules[longest] + name[len(longest) :] if beginnings else name
        assert found.get(name, name) == whole.get(name, expected)
