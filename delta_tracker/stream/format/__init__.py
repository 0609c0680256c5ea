"""Serialization of manifests and parts.

Read ``manifest.py`` first: it defines the record of a version. ``parse.py`` parses and checks it, ``part_writer.py``
and ``part_reader.py`` write and read the objects, with ``digests.py`` for the checks of their pieces. ``encoding.py``
encodes rows and ids, and ``state_tree.py`` the states of training objects.
"""
