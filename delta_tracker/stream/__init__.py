"""Durable stream of versions in an object store.

Read ``log.py`` first: it appends versions and decides which publisher may write. ``cursor.py`` finds the next entry
for a reader. ``format/`` serializes manifests and parts, ``storage/`` accesses the stores, ``maintenance/`` deletes and
merges old versions, and ``notify/`` sends hints of new versions. ``FORMAT.md`` is the specification.
"""
