"""Hints that a version was committed. A hint makes a predictor poll immediately. A hint may be lost.

Read ``notifier.py`` first: it defines the protocol. ``redis_hints.py`` is a notifier over Redis Streams.
"""
