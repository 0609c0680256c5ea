"""A durable stream of versions in a store of objects.

Open ``log.py`` first: it decides which version is the next one and who may write it. ``cursor.py`` reads version
after version, ``format/`` has the bytes, ``storage/`` the stores, ``maintenance/`` removes and merges old versions,
``notify/`` carries hints of new ones. ``FORMAT.md`` specifies all of it.
"""
