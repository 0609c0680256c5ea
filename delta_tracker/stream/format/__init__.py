"""The bytes of manifests and parts.

Open ``manifest.py`` first: it has the record of a version. ``parse.py`` reads and checks one, ``part_writer.py`` and
``part_reader.py`` write and read the files with the rows, ``encoding.py`` has the forms in which rows are stored.
"""
