"""Letters of all ranks to rank 0 and its answers, over a process group of the workers: :class:`Rounds`."""

from __future__ import annotations

import struct
from enum import IntEnum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from delta_tracker.errors import RankLostError
from delta_tracker.tracker.rank_group import RankGroup

_HEADER = struct.Struct("<qqq")  # number, sign, and length of the data
_FRAME_BYTES = 4096  # what is longer needs a second transfer
_FIRST_BYTES = _FRAME_BYTES - _HEADER.size


class Sign(IntEnum):
    """Content of a letter or an answer."""

    WORKING = auto()
    """The rank still writes its share, or rank 0 commits: another round follows."""
    SHARE = auto()
    """Description of the rank's share of the version."""
    WAITING = auto()
    """The rank has sent its share in an earlier round."""
    OUTCOME = auto()
    """Outcome of the version, with which the exchange ends."""


class Letter(NamedTuple):
    """Message of one rank.

    Args:
        number: number of the version's cut.
        sign: its content.
        data: data of a share or an outcome.
    """

    number: int
    sign: Sign
    data: bytes = b""


class Rounds:
    """Rounds in which each rank sends a letter to rank 0, and rank 0 answers all.

    All methods raise RankLostError if a rank died, does not take part in time, or is at another version. Rank 0 then
    leaves the group, so that the other ranks notice it at once.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def collect(self, number: int) -> dict[int, Letter]:
        """Return the letters of all ranks but rank 0, which calls this method."""
        frames = self._group.gather(torch.zeros(_FRAME_BYTES, dtype=torch.uint8))
        return {rank: self._opened(frames[rank], rank, number) for rank in range(1, len(frames))}

    def send(self, letter: Letter) -> None:
        """Send a letter to rank 0."""
        frame, rest = _packed(letter)
        self._group.gather(frame)
        if rest is not None:
            self._group.send(rest, 0)

    def answer(self, letter: Letter) -> None:
        """Send an answer of rank 0 to all ranks."""
        frame, rest = _packed(letter)
        self._group.send_all(frame)
        if rest is not None:
            self._group.send_all(rest)

    def receive(self, number: int) -> Letter:
        """Wait for the answer of rank 0."""
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._group.receive(frame, 0)
        return self._opened(frame, 0, number)

    def _opened(self, frame: Tensor, rank: int, number: int) -> Letter:
        """Return the letter in a frame, after receiving the rest of it."""
        data = frame.numpy().tobytes()
        other, sign, length = _HEADER.unpack_from(data)
        if other != number:
            reason = f"rank {rank} is at cut {other} of this publisher, and rank {self._group.rank} at cut {number}"
            self._group.leave(reason)
            raise RankLostError(reason)
        first = data[_HEADER.size : _HEADER.size + length]
        if length > _FIRST_BYTES:
            rest = torch.empty(length - _FIRST_BYTES, dtype=torch.uint8)
            self._group.receive(rest, rank)
            first += rest.numpy().tobytes()
        return Letter(number, Sign(sign), first)


def _packed(letter: Letter) -> tuple[Tensor, Tensor | None]:
    """Return the frame of a letter, and what does not fit into it."""
    data = _HEADER.pack(letter.number, letter.sign, len(letter.data)) + letter.data
    frame = torch.frombuffer(bytearray(data[:_FRAME_BYTES].ljust(_FRAME_BYTES)), dtype=torch.uint8)
    rest = data[_FRAME_BYTES:]
    return frame, torch.frombuffer(bytearray(rest), dtype=torch.uint8) if rest else None
