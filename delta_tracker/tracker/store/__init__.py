"""Row stores. Each keeps the changed rows of one shard and returns the rows that changed since a position.

Open ``marked_rows.py`` first: it has the rows that were marked between cuts. ``segments.py`` adds the writes of the
tables whose writes hooks report. ``shadow.py`` has the store for all other tables, which compares the shard with a
copy, and chooses between the two. ``lookups.py`` has ``DeltaStore``, a class with the interface of
TorchRec's ``DeltaStore``. Trackers do not use it.
"""
