"""Tests of the buckets and owners of raw ids."""

from __future__ import annotations

import random

import pytest
import torch

from delta_tracker.errors import InvalidArgumentError
from delta_tracker.raw_ids.raw_id_map import NO_OWNER, bucket_of, check_owners, defaults_of
from delta_tracker.types import Bucket, Identity

_EDGES = [0, 1, 2, 3, 7, 100, 1000, (1 << 31) - 1, 1 << 62, (1 << 63) - 70_000, (1 << 63) - 2, (1 << 63) - 1]


def _identity(hash_size: int, num_buckets: int, *, rows: int = 4) -> Identity:
    starts = range(0, rows * num_buckets, rows)
    return Identity(hash_size, tuple(Bucket((first, first + rows), first + rows - 1) for first in starts))


def _bucket(hash_size: int, num_buckets: int, raw_id: int) -> int:
    """Return the bucket of a raw id, in Python's unbounded integers."""
    unsigned = raw_id % (1 << 64)
    size = -(-hash_size // num_buckets)
    return unsigned // size if unsigned < size * num_buckets else unsigned % num_buckets


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 7, 64, 1000])
def test_the_bucket_of_any_raw_id_is_exact(num_buckets: int) -> None:
    rng = random.Random(num_buckets)
    ids = {each + shift for each in (*_EDGES, 1 << 63) for shift in (-2, -1, 0, 1, 2)}
    ids |= {-each for each in ids} | {rng.randrange(-(1 << 63), 1 << 63) for _ in range(200)}
    for hash_size in (*_EDGES, rng.randrange(1 << 63)):
        size = -(-hash_size // num_buckets)
        near = {size * k + shift for k in (1, num_buckets - 1, num_buckets) for shift in (-1, 0, 1)}
        near |= {each - (1 << 64) for each in near}
        known = sorted(each for each in ids | near if -(1 << 63) <= each < 1 << 63)
        found = bucket_of(_identity(hash_size, num_buckets), torch.tensor(known))
        assert found.tolist() == [_bucket(hash_size, num_buckets, each) for each in known]


def test_unknown_ids_read_the_default_row_of_their_bucket() -> None:
    ids = torch.tensor([[3, 50], [101, -1]])
    assert defaults_of(_identity(100, 2), ids).tolist() == [[3, 7], [7, 7]]
    assert defaults_of(Identity(100, (Bucket((0, 4), None), Bucket((4, 8), None))), ids).tolist() == [[-1, -1]] * 2


@pytest.mark.parametrize(
    ("slots", "owners", "reason"),
    [
        ([0, 3], [1, 2], "the default row 3 has the raw id 2"),
        ([0, 4], [1, 2], "row 4 has the raw id 2, which belongs to another bucket"),
        ([1, 0, 5], [7, 7, 60], "the raw id 7 has two rows"),
    ],
)
def test_owners_that_no_collision_module_has_are_found(slots: list[int], owners: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        check_owners(_identity(100, 2), torch.tensor(slots), torch.tensor(owners))
    if "two rows" in reason:
        check_owners(_identity(100, 2), torch.tensor(slots), torch.tensor(owners), is_unique=False)


def test_owners_by_bucket_pass_the_check() -> None:
    none = NO_OWNER
    check_owners(_identity(100, 2), torch.arange(8), torch.tensor([-2, 0, none, none, 50, -1, 101, none]))
    check_owners(Identity(0, (Bucket((0, 2), None),)), torch.tensor([1, 0]), torch.tensor([-1, 9]))


@pytest.mark.parametrize(
    ("hash_size", "buckets"),
    [
        (-1, (Bucket((0, 4), 3),)),
        (1 << 63, (Bucket((0, 4), 3),)),
        (1, ()),
        (1, (Bucket((1, 4), 3),)),
        (1, (Bucket((0, 0), None),)),
        (1, (Bucket((0, 4), 4),)),
        (1, (Bucket((0, 4), 3), Bucket((5, 8), 7))),
        (1, (Bucket((0, 4), 3), Bucket((4, 8), None))),
    ],
)
def test_an_invalid_identity_is_refused(hash_size: int, buckets: tuple[Bucket, ...]) -> None:
    with pytest.raises(InvalidArgumentError):
        Identity(hash_size, buckets)
