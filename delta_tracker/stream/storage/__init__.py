"""Where objects lie: directories and S3.

Open ``storage.py`` first: it has the class that everything else uses. ``url.py`` takes addresses apart, ``local.py``
makes directories durable.
"""
