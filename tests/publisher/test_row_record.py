"""The record of a shard's stored rows, compared with a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from delta_tracker.publisher.row_record import RowRecord

_NUM_ROWS = 5
_IDS = st.lists(st.integers(0, _NUM_ROWS - 1), unique=True, min_size=1)
_CALLS = st.lists(st.tuples(_IDS, st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=12)


@given(
    calls=_CALLS, widths=st.sampled_from([(8,), (4, 8), (3, 2), (16, 8, 4)]), has_digests=st.booleans(), whole=st.data()
)
def test_a_row_is_equal_if_its_parts_are_those_of_a_committed_version(
    calls: list[tuple[list[int], int, int, bool]], widths: tuple[int, ...], has_digests: bool, whole: st.DataObject
) -> None:
    record = RowRecord(_NUM_ROWS, widths, has_digests=has_digests)
    known: dict[int, tuple[int, int]] = {}
    num_copied = whole.draw(st.integers(0, _NUM_ROWS))
    for number, width in enumerate(widths):
        record.write(number, 0, np.zeros((num_copied, width), np.uint8))
        record.write(number, num_copied, np.zeros((_NUM_ROWS - num_copied, width), np.uint8))
    if whole.draw(st.booleans()):
        record.write(0, 0, np.zeros((1, widths[0]), np.uint8))  # read twice: no row of the copy is known
    else:
        known = dict.fromkeys(range(_NUM_ROWS), (0, 0))
    record.confirm_all()
    for ids, first, rest, is_committed in calls:
        parts = [np.full((len(ids), width), rest if number else first, np.uint8) for number, width in enumerate(widths)]
        value = first, rest if len(widths) > 1 else 0
        same = record.replace(np.array(ids), parts)
        assert same.tolist() == [known.get(each) == value for each in ids]
        for each in ids:
            if known.get(each) != value:
                known.pop(each, None)
                if is_committed:
                    known[each] = value
        if is_committed:
            record.confirm(np.array(ids)[~same])


def test_the_memory_of_a_row_is_its_bytes_or_a_digest_and_one_byte() -> None:
    assert RowRecord(100, [72, 8], has_digests=False).num_bytes == 100 * 81
    assert RowRecord(100, [72, 8], has_digests=True).num_bytes == 100 * 17
