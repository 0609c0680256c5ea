"""Durable stream of versions in an object store.

Read ``log.py`` first: it appends versions and decides which publisher may write. ``reading/`` decides what a reader
applies next. ``format/`` serializes manifests and parts, ``storage/`` accesses the stores, ``maintenance/`` deletes and
merges old versions, and ``notify/`` sends hints about new versions. ``FORMAT.md`` is the specification.
"""
