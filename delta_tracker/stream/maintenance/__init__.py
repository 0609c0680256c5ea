"""Maintenance of a stream: delete versions that no reader needs, and merge versions.

Read ``upkeep.py`` first: it runs ``retention.py`` and ``compaction.py`` in the background. ``merging.py`` keeps the
newest value of each row.
"""
