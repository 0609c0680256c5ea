"""Row stores. Each keeps the changed rows of one shard and returns the rows that changed since a position.

Open ``marked_rows.py`` first: it has the rows that were marked between cuts. ``segments.py`` has the store of tables
whose writes are reported by hooks. ``shadow.py`` has the store of all other tables. It compares the shard with a copy.
``make_store`` in the same file chooses between the two. ``lookups.py`` has ``DeltaStore``, a class with the interface
of TorchRec's ``DeltaStore``. Trackers do not use it.
"""
