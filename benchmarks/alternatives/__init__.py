"""Four ways to bring the changed rows of a trainer to a predictor, for :mod:`benchmarks.bench_alternatives`."""
