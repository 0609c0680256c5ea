"""Models that a restore has written in part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from delta_tracker.errors import IncompleteModelError
from delta_tracker.sharding.interrupted import check_complete, mark_complete, mark_incomplete


def test_an_incomplete_model_says_so_before_any_other_hook_runs() -> None:
    model, seen = nn.Linear(2, 2), []
    model.register_forward_pre_hook(lambda *_: seen.append("another hook"))
    model.register_forward_pre_hook(lambda *_, **__: seen.append("with keywords"), with_kwargs=True)
    check_complete(model)
    mark_incomplete(model, 5)
    for call in (lambda: model(torch.ones(1, 2)), lambda: check_complete(model)):
        with pytest.raises(IncompleteModelError, match=r"a restore of version 5 was interrupted\. Call restore\(\)"):
            call()
    assert seen == []


def test_a_later_restore_removes_the_mark_of_an_earlier_one() -> None:
    model, seen = nn.Linear(2, 2), []
    model.register_forward_pre_hook(lambda *_: seen.append("another hook"))
    mark_incomplete(model, 5)
    mark_incomplete(model, 7)
    with pytest.raises(IncompleteModelError, match="version 7"):
        check_complete(model)
    mark_complete(model)
    check_complete(model)
    model(torch.ones(1, 2))
    assert seen == ["another hook"]
