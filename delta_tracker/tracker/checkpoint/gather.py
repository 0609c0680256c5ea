"""Gather all ranks' saved states on rank 0, for trainers that save only from rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from delta_tracker.tracker.checkpoint.rank_header import parse
from delta_tracker.tracker.rank_group import RankGroup

Strategy = Literal["local", "gather", "gather_or_local"]

_BYTE = torch.uint8


def gather_parts(state: Mapping[str, Tensor], group: RankGroup) -> dict[str, Tensor]:
    """Send the saved state of every rank, called its *part*, to rank 0. All ranks must call this function.

    The tensors are sent one after the other.

    Args:
        state: this rank's part, by key. The header is the first tensor.
        group: group of all ranks.

    Returns:
        On rank 0, the tensors of all parts by key. On the other ranks, an empty dict.

    Raises:
        CheckpointError: if a rank sends an invalid header.
        RankLostError: if a rank died or did not answer in time.
    """
    header = next(iter(state.values()))
    lengths = group.all_gather(torch.tensor([len(header)]))
    if group.rank:
        for tensor in state.values():
            if tensor.numel():
                group.send(tensor.contiguous().reshape(-1).view(_BYTE), 0)
        return {}
    gathered = dict(state)
    for source in range(1, len(lengths)):
        received = torch.empty(int(lengths[source]), dtype=_BYTE)
        group.receive(received, source)
        part = parse(f"rank{source}of{len(lengths)}/header", received)
        gathered[f"{part.prefix}header"] = received
        for name, (dtype, shape) in part.all_layouts().items():
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                group.receive(tensor.reshape(-1).view(_BYTE), source)
            gathered[part.prefix + name] = tensor
    return gathered
