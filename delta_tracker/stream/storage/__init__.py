"""Object stores: directories, memory, S3, Google Cloud Storage and Azure.

Read ``storage.py`` first: it defines the class that all other modules use. ``url.py`` lists the supported URL schemes;
add a new kind of store there. ``local.py`` writes files durably.
"""
