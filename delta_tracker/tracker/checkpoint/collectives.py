"""Collectives of checkpoints: :func:`run_on_all_ranks` compares results, :func:`gather_parts` gathers saved states.

:func:`refuse_dcp_load` raises an error if a tracker or counters are passed to ``dcp.load`` without an adapter.
"""

import json
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Literal

import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, RankFailedError
from delta_tracker.tracker.checkpoint.part import parse
from delta_tracker.tracker.rank_group import RankGroup

Strategy = Literal["local", "gather", "gather_or_local"]

_BYTE = torch.uint8


def run_on_all_ranks(action: Callable[[], Mapping[str, object] | None], group: RankGroup) -> None:
    """Call ``action`` on every rank, and check that it returns the same result on all ranks. A collective.

    Call this function before operations that block forever if a rank fails or passes different arguments. ``action``
    returns JSON values by name, or None. Raises RankFailedError if the results differ, or if ``action`` raised an error
    on another rank. If ``action`` raised an error on this rank, this error is raised.
    """
    try:
        message: dict[str, object] = {"result": action() or {}}
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
                raise RankFailedError(rank, reason, "agree").with_remedy(remedy)


def _exchange(message: Mapping[str, object], group: RankGroup) -> list[dict[str, dict[str, object]]]:
    data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=_BYTE)
    lengths = [int(each) for each in group.all_gather(torch.tensor([len(data)], device="cpu"))]
    padded = torch.nn.functional.pad(data, (0, max(lengths) - len(data)))
    gathered = zip(group.all_gather(padded), lengths, strict=True)
    return [json.loads(bytes(each[:length].numpy())) for each, length in gathered]


def gather_parts(state: Mapping[str, Tensor], group: RankGroup, strategy: str) -> dict[str, Tensor]:
    """Gather the saved states of all ranks on rank 0. A collective. ``state`` is the saved state (*part*) of this rank.

    Returns the tensors of all parts, by key, on rank 0. On other ranks, returns ``state`` if ``strategy`` is
    ``gather_or_local``, and an empty dict otherwise. Raises CheckpointError if a rank sends an invalid header.
    """
    header = next(iter(state.values()))
    lengths = group.all_gather(torch.tensor([len(header)], device="cpu"))
    if group.rank:
        for tensor in state.values():
            if tensor.numel():
                group.send(tensor.contiguous().reshape(-1).view(_BYTE), 0)
        return dict(state) if strategy == "gather_or_local" else {}
    gathered = dict(state)
    for source in range(1, len(lengths)):
        received = torch.empty(int(lengths[source]), dtype=_BYTE, device="cpu")
        group.receive(received, source)
        part = parse(f"rank{source}of{len(lengths)}/header", received)
        gathered[f"{part.prefix}header"] = received
        for name, (dtype, shape) in part.all_layouts().items():
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            if tensor.numel():
                group.receive(tensor.reshape(-1).view(_BYTE), source)
            gathered[part.prefix + name] = tensor
    return gathered


def refuse_dcp_load(argument: str, adapter: str) -> None:
    """Raise InvalidArgumentError if the caller runs inside ``dcp.load``.

    ``dcp.load`` calls ``state_dict()`` to get the tensors to fill, but the saved tensors may have other keys and sizes.
    The error message names ``argument``, which was passed to ``dcp.load``, and ``adapter``, the object to pass instead.
    """
    if dcp_load_frame() is not None:
        remedy = f"Pass {adapter} of delta_tracker.integrations.dcp to dcp.load()"
        raise InvalidArgumentError(argument, "an object to load", remedy)


def dcp_load_frame() -> FrameType | None:
    """Return the stack frame of ``dcp.load`` if the caller runs inside ``dcp.load``, otherwise None."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  the only way to know the caller
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict_loader":
        frame = frame.f_back
    return frame
