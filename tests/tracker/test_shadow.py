"""The shadow store detects every change bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from delta_tracker.tracker.store import shadow
from delta_tracker.tracker.store.shadow import ShadowStore
from tests.syncs import SIMULATED, find_syncs, held, on_device


def test_a_shadow_detects_every_change_bit_for_bit() -> None:
    weights = torch.zeros(9, 2)
    weights[3] = torch.nan

    def read(ids: Tensor | None) -> Tensor:
        return weights.clone() if ids is None else weights[ids]

    store = ShadowStore(read, 9, keeps_states=True)
    store.cut(1)
    assert store.changed(0, 1).ids.tolist() == [], "NaN equals itself"
    weights[2], weights[5, 1], weights[7, 0] = 1.0, -0.0, torch.nan
    store.cut(2)
    changed = store.changed(1, 2)
    assert changed.ids.tolist() == [2, 5, 7]
    assert changed.states.tolist() == [[0, 0]] * 3
    assert changed.known.all()
    weights[2] = 2.0
    store.cut(3)
    assert store.changed(2, 3).ids.tolist() == [2]
    assert store.changed(1, 3).states[0].tolist() == [0, 0], "the older state wins"
    assert store.copy.nbytes == weights.nbytes


def test_a_comparison_on_a_device_waits_once_for_any_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "_CHUNK_ROWS", 4)
    for num_rows in (3, 30):
        weights = torch.zeros(num_rows, 2)
        with find_syncs():
            store = ShadowStore(
                lambda ids, rows=weights: on_device(rows.clone() if ids is None else rows[held(ids)]),
                num_rows,
                SIMULATED,
                engine="torch",
                keeps_states=True,
            )
            for rows in ([], [1], [0, 2, num_rows - 1]):
                weights[rows] += 1.0
                with find_syncs() as found:
                    store.catch_up()
                assert len(found) == 1, found
                store.cut(store.num_segments)
            assert sorted(set(held(store.changed(0, 9).ids).tolist())) == sorted({0, 1, 2, num_rows - 1})
