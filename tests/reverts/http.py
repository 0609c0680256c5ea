"""Promises of reading over HTTP and in the pointer."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS: list[Revert] = []
