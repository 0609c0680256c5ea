"""Maintenance of a stream: deletion of versions that no reader needs, and merging of versions.

Read ``upkeep.py`` first: it runs ``retention.py`` and ``compaction.py`` in the background.
"""
