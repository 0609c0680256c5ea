"""Patch the methods of ``DistributedModelParallel``, which no changed import reaches. Each process imports this."""

from __future__ import annotations

from delta_tracker.compat import patch_torchrec

patch_torchrec()
