"""Where objects are stored: directories, memory, S3, Google Cloud Storage and Azure.

Open ``storage.py`` first: it has the class that everything else uses. ``url.py`` lists the schemes of urls: a new
kind of store is added there. ``local.py`` makes directories durable.
"""
