"""Promises of the fleet view and pins."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS: list[Revert] = []
