"""Hints of new versions, which make predictors look at once. They carry no data, and may be lost.

Open ``notifier.py`` first: it has the protocol. ``redis.py`` is a notifier over Redis Streams.
"""
