"""Serialization of manifests and parts.

Read ``manifest.py`` first: it defines the record of a version. ``parse.py`` parses and checks it, and
``part_writer.py`` and ``part_reader.py`` write and read the objects. ``digests.py`` computes the digests of an object's
pieces, ``encoding.py`` encodes rows and ids, ``state_tree.py`` encodes the states of training objects, and
``table_choice.py`` chooses tables.
"""
