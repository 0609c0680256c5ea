"""A clock that tests advance."""

from __future__ import annotations


class ManualClock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def go(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def time_ns(self) -> int:
        return 1_700_000_000_000_000_000 + self.now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns
