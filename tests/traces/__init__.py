"""Traces of the readers of a log: what is visible from outside while tests and worlds run.

Record the old code with ``python -m tests.traces record before.json.gz`` and the new code in another file, and compare
them with ``python -m tests.traces compare before.json.gz after.json.gz``. Everything runs several times. Of each
reader, the first form is kept that is the same in all runs: everything, or without the requests for objects in
``control/``, which are sent from time to time, or without requests, or only its versions. Requests of other threads,
and those of a predictor that follows, are never kept.
"""
