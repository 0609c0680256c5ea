"""The changed rows of one shard, readable from any position of the log.

Open ``segments.py`` first: it has the store of tables with a fused optimizer. ``shadow.py`` compares the others with
a copy, ``lookups.py`` is the store of the seed interface.
"""
