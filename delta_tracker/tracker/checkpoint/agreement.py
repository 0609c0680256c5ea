"""Check that all ranks build the same tracker, before one of them waits for the others in a later collective."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch

from delta_tracker.errors import RankFailedError
from delta_tracker.tracker.rank_group import RankGroup


def agree(action: Callable[[], Mapping[str, object]], group: RankGroup) -> None:
    """Call ``action`` and compare its result with those of the other ranks. All ranks must call this function.

    Args:
        action: returns a JSON object that must be equal on all ranks, and may raise an error.
        group: group of all ranks.

    Raises:
        RankFailedError: if the results differ, or if ``action`` raised an error on another rank only.
        RankLostError: if a rank died or did not answer in time.
        Exception: the error that ``action`` raised on this rank.
    """
    try:
        message: dict[str, object] = {"result": action()}
    except Exception as error:
        _exchange({"error": f"{type(error).__name__}: {error}"}, group)
        raise
    every = _exchange(message, group)
    for rank, each in enumerate(every):
        if "error" in each:
            raise RankFailedError(rank, str(each["error"]), "agree")
    results = [each["result"] for each in every]
    for rank, result in enumerate(results):
        for what, value in result.items():
            if value != results[0][what]:
                reason = f"{what}: {value} where rank 0 has {results[0][what]}"
                remedy = "Build the same tracker and load the same checkpoint on every rank"
                raise RankFailedError(rank, reason, "agree").advising(remedy)


def _exchange(message: Mapping[str, object], group: RankGroup) -> list[dict[str, dict[str, object]]]:
    """Return the JSON objects of all ranks, by rank."""
    data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)
    lengths = [int(each) for each in group.all_gather(torch.tensor([len(data)]))]
    padded = torch.nn.functional.pad(data, (0, max(lengths) - len(data)))
    gathered = zip(group.all_gather(padded), lengths, strict=True)
    return [json.loads(bytes(each[:length].numpy())) for each, length in gathered]
