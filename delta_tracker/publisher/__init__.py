"""Write the changed rows of a tracker to a stream, as versions, from all ranks.

Open ``publisher.py`` first: it defines the public class. ``versions.py`` contains the states of a version in progress
and decides on the next step of all ranks, ``tracker_reader.py`` reads the rows of a version from the tracker,
``training.py`` collects the training state at the same cut, ``rank_tables.py`` copies the rows, and ``coordinator.py``
writes parts and commits the manifest together with the other ranks.
"""
