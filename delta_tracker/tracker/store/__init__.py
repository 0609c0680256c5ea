"""Row stores. Each store records which rows of one shard changed, and returns the rows that changed since a position.

Open ``marked_rows.py`` first: it contains the base class. ``segments.py`` contains the store for tables whose writes
are reported by hooks. ``shadow.py`` contains the store for all other tables, which compares the shard with a copy, and
``make_store``, which chooses between these two stores. ``lookups.py`` contains ``DeltaStore``, a standalone class with
the interface of TorchRec's ``DeltaStore``. Trackers do not use this class.
"""
