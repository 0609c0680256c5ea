"""Names and labels that a sink could not carry are refused."""

from __future__ import annotations

import pytest

from delta_tracker.errors import InvalidArgumentError


@pytest.mark.parametrize("bad", ["", "1a", "a b", "a..b", "a-b", ".a", "a.", "x" * 201, "ä", None])
def test_malformed_names_are_refused(monitor, bad) -> None:
    with pytest.raises(InvalidArgumentError, match="name"):
        monitor.counter(bad)


@pytest.mark.parametrize("labels", [["le"], ["quantile"], ["__x"], ["a", "a"], ["1"], [3]])
def test_malformed_labels_are_refused(monitor, labels) -> None:
    with pytest.raises(InvalidArgumentError, match="labels"):
        monitor.counter("c", labels=labels)
