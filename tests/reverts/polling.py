"""Promises of polling, catching up and canaries."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS: list[Revert] = []
