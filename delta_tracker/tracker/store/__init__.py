"""Row stores: the changed rows of one shard, readable from any position of the change log.

Open ``segments.py`` first: it has the store of tables with a fused optimizer. ``shadow.py`` compares the others with
a copy, ``make_store.py`` chooses between them. ``lookups.py`` has the store classes of TorchRec's interface.
"""
