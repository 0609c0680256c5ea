"""Object stores: directories, memory, S3, Google Cloud Storage, Azure and web servers.

Read ``store.py`` first: it defines what a kind of store does. ``directory.py``, ``memory.py`` and ``objects.py`` have
the kinds, and ``storage.py`` is what all other modules use.
"""
