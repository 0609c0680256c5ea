"""Object stores: directories, memory, S3, Google Cloud Storage, Azure and web servers.

Read ``store.py`` first: it defines the interface of a kind of store. ``directory.py``, ``memory.py`` and ``objects.py``
implement it, and ``storage.py`` defines the class that all other modules use.
"""
