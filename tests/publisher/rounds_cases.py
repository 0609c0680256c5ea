"""Cases of letters between the workers of ranks."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

from delta_tracker.errors import RankLostError
from delta_tracker.publisher.delivery import MessageRounds
from delta_tracker.tracker.rank_group import RankGroup


def lengths(rank: int, world_size: int) -> None:
    """Letters and answers of any length arrive."""
    with closing(RankGroup("letters", "lengths()", timedelta(seconds=60))) as group:
        for number, length in enumerate((0, 1, 4079, 4080, 4081, 8192, 100_000)):
            rounds = MessageRounds(group, number)
            if rank == 0:
                assert rounds.collect() == {each: bytes([each]) * length for each in range(1, world_size)}
                rounds.send_answer(b"a" * length)
            else:
                rounds.send(bytes([rank]) * length)
                assert rounds.receive() == b"a" * length


def different_versions(rank: int, world_size: int) -> list[str]:
    """Ranks that are at different versions are lost to each other at once."""
    with closing(RankGroup("letters", "different_versions()", timedelta(seconds=60))) as group:
        rounds, messages = MessageRounds(group, 4 + rank), []
        try:
            if rank == 0:
                rounds.collect()
            else:
                rounds.send()
        except RankLostError as error:
            messages.append(str(error))
    return messages
