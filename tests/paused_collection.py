"""Disables garbage collections: the server of :mod:`tests.forked` imports this first, and each fork enables them."""

from __future__ import annotations

import gc

gc.disable()
