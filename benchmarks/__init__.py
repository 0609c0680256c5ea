"""Programs that measure the library and check their own results; each is run as ``python -m benchmarks.NAME``."""
