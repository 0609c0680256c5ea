"""Messages of plausible mistakes name the offender and the next step."""

from __future__ import annotations

import warnings

import pytest

from tests.mistakes import MISTAKES, Mistake, said


@pytest.mark.promise("refused")
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_is_named_with_the_next_step(mistake: Mistake) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = said(mistake)
    assert mistake.offender in text
    assert mistake.step in text


def test_there_are_at_least_sixty_mistakes() -> None:
    assert len(MISTAKES) >= 60
