"""All ranks' saved parts on rank 0, for those who save from rank 0 alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch import distributed as dist

from delta_tracker.checkpoint.part import parse

_BYTE = torch.uint8


def gather_parts(state: Mapping[str, Tensor], rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Send the part of every rank to rank 0, tensor by tensor. A collective.

    Args:
        state: this rank's part.
        rank: this rank.
        group: a gloo group of all ranks.

    Returns:
        On rank 0 the parts of all ranks, elsewhere nothing.

    Raises:
        MalformedStateError: if a rank sends what is no part.
    """
    header = next(iter(state.values()))
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(header)]), group=group)
    if rank:
        for tensor in state.values():
            if tensor.numel():
                dist.send(tensor.contiguous().reshape(-1).view(_BYTE), dst=0, group=group)
        return {}
    gathered = dict(state)
    for source in range(1, len(lengths)):
        received = torch.empty(int(lengths[source]), dtype=_BYTE)
        dist.recv(received, src=source, group=group)
        part = parse(f"rank{source}of{len(lengths)}/header", received)
        gathered[f"{part.prefix}header"] = received
        for name, (dtype, shape) in part.all_layouts().items():
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                dist.recv(tensor.reshape(-1).view(_BYTE), src=source, group=group)
            gathered[part.prefix + name] = tensor
    return gathered
