"""What keeps a stream small: removing versions that nobody needs, and merging versions.

Open ``upkeep.py`` first: it runs ``retention.py`` and ``compaction.py`` in the background. ``merging.py`` finds the
newest rows.
"""
