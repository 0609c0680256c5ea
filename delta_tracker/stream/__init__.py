"""A durable stream of versions in a store of objects.

Open ``log.py`` first: it says which version is the next one and who may write it. ``cursor.py`` reads version after
version, ``format/`` has the bytes, ``storage/`` the stores, ``maintenance/`` what removes and merges versions,
``notify/`` the hints of new ones. ``FORMAT.md`` specifies all of it.
"""
