"""Cases of letters between the workers of ranks."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

from delta_tracker.errors import RankLostError
from delta_tracker.publisher.delivery import Letter, Rounds, Sign
from delta_tracker.tracker.rank_group import RankGroup


def lengths(rank: int, world_size: int) -> None:
    """Letters and answers of any length arrive."""
    with closing(RankGroup("letters", "lengths()", timedelta(seconds=60))) as group:
        rounds = Rounds(group)
        for number, length in enumerate((0, 1, 4071, 4072, 4073, 8192, 100_000)):
            if rank == 0:
                letters = rounds.collect(number)
                assert [letters[each].data for each in range(1, world_size)] == [
                    bytes([each]) * length for each in range(1, world_size)
                ]
                rounds.answer(Letter(number, Sign.OUTCOME, b"a" * length))
            else:
                rounds.send(Letter(number, Sign.SHARE, bytes([rank]) * length))
                assert rounds.receive(number) == Letter(number, Sign.OUTCOME, b"a" * length)


def different_versions(rank: int, world_size: int) -> list[str]:
    """Ranks that are at different versions are lost to each other at once."""
    with closing(RankGroup("letters", "different_versions()", timedelta(seconds=60))) as group:
        rounds, messages = Rounds(group), []
        try:
            if rank == 0:
                rounds.collect(4)
            else:
                rounds.send(Letter(4 + rank, Sign.SHARE))
        except RankLostError as error:
            messages.append(str(error))
    return messages
