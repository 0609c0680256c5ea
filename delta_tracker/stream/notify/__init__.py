"""Hints of new versions, which make predictors poll immediately. They carry no data and may be lost.

Read ``notifier.py`` first: it defines the protocol. ``redis.py`` is a notifier over Redis Streams.
"""
