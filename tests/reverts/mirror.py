"""Promises of mirrors, forks and failover."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS: list[Revert] = []
