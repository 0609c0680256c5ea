"""Row stores: the changed rows of one shard, readable from any position of the change log.

Open ``segments.py`` first: it has the store of tables with a fused optimizer. ``shadow.py`` has the store of the other
tables, which it compares with a copy. ``make_store.py`` chooses between the two. ``lookups.py`` has the ``DeltaStore``
of TorchRec's interface.
"""
