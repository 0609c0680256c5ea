"""Row stores that a predictor writes a stream to, and their readers in other processes.

Start with ``stored_rows.py``, which describes the contents of a row store and the result of a lookup. ``redis.py`` and
``lmdb.py`` write to Redis and LMDB, ``redis_rows.py`` and ``lmdb_rows.py`` read from them. The interface of the writers
is in ``row_sink.py``. The packages of the stores are extras.
"""
