"""Hints of new versions, which make predictors poll immediately. They carry no data and may be lost.

Start with ``notifier.py``: it defines the protocol. ``redis.py`` is a notifier over Redis Streams.
"""
