"""Row stores. Each store keeps the changed rows of one shard and returns the rows that changed since a position.

Open ``marked_rows.py`` first: it contains the base class. ``segments.py`` contains the store of tables whose writes are
reported by hooks. ``shadow.py`` contains the store of all other tables, which compares the shard with a copy, and
``make_store``, which chooses between the two stores. ``lookups.py`` contains ``DeltaStore``, a class with the interface
of TorchRec's ``DeltaStore``. Trackers do not use it.
"""
