"""Benchmarks that check their own results. Run one as ``python -m benchmarks.NAME``."""
