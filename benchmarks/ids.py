"""Distributions of ids. Shapes: ``N`` ids, ``R`` rows of a table."""

from __future__ import annotations

import torch
from torch import Tensor


def uniform_ids(num_rows: int, num_ids: int, generator: torch.Generator) -> Tensor:
    """Return ``[N]`` int64 ids, uniformly distributed."""
    return torch.randint(num_rows, (num_ids,), generator=generator)


def zipf_ids(num_rows: int, num_ids: int, generator: torch.Generator, exponent: float = 1.05) -> Tensor:
    """Return ``[N]`` Zipf-distributed int64 ids: id ``k - 1`` has a probability proportional to ``k**-exponent``.

    Drawn by inversion of the continuous distribution on ``[1, R + 1)``, whose distribution function is
    ``(1 - x ** (1 - exponent)) / (1 - (R + 1) ** (1 - exponent))``.

    Args:
        num_rows: ``R``.
        num_ids: ``N``.
        generator: source of random numbers.
        exponent: greater than 1.
    """
    uniform = torch.rand(num_ids, generator=generator, dtype=torch.float64)
    power = 1 - exponent
    ranks: Tensor = (1 - uniform * (1 - (num_rows + 1.0) ** power)) ** (1 / power)
    return (ranks.long() - 1).clamp_(0, num_rows - 1)


def distinct_ids(num_rows: int, num_ids: int, generator: torch.Generator) -> Tensor:
    """Return ``[N]`` distinct int64 ids, ascending, drawn uniformly."""
    chosen: Tensor = torch.randperm(num_rows, generator=generator)[:num_ids]
    return chosen.sort()[0]
