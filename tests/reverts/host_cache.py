"""Promises of the host cache and hints over NATS."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS: list[Revert] = []
