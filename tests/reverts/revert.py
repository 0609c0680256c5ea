"""A fault that a generator finds, and how to bring it back."""

from __future__ import annotations

from tests.reverts.mutation import Mutation


class Revert:
    """Fault that was fixed, and the mutations of the fixed code that bring it back.

    Args:
        defect: what goes wrong, as a short sentence.
        mutations: the mutations; none if the code that had the fault is being replaced. The revert is then only listed,
            until it names a function of the new code.
    """

    def __init__(self, defect: str, *mutations: Mutation) -> None:
        self.defect = defect
        self.mutations = mutations
