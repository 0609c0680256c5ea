"""Row stores in Redis and LMDB: sinks for predictors to write a stream to, and readers for other processes.

Start with ``stored_rows.py``, which defines the format of stored rows and the result of a lookup. ``row_sink.py``
defines the interface of a sink; ``redis.py`` and ``lmdb.py`` implement it. ``redis_rows.py`` and ``lmdb_rows.py``
contain the readers. Each store requires the extra of the same name.
"""
