"""Digests of pieces, as FORMAT.md defines them."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from delta_tracker.stream.format import digests as digests_module
from delta_tracker.stream.format.digests import PieceHasher, piece_at, piece_range, total_bytes


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests_module, "PIECE_BYTES", 4)


@pytest.mark.parametrize("body", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("step", [1, 3, 4, 9, 20])
def test_each_piece_has_the_digest_of_its_bytes(body: int, step: int) -> None:
    data = np.arange(body, dtype=np.uint8)
    hasher = PieceHasher()
    for begin in range(0, body, step):
        hasher.update(data[begin : begin + step].data)
    found = hasher.digests()
    pieces = [data[begin : begin + 4] for begin in range(0, body, 4)]
    assert found == b"".join(xxhash.xxh3_128_digest(piece.tobytes()) for piece in pieces)
    assert total_bytes(body) == body + len(found)
    for number, piece in enumerate(pieces):
        assert piece_at(4 * number + len(piece) - 1) == (number, len(piece) - 1)
        assert data[slice(*piece_range(number, body))].tobytes() == piece.tobytes()
