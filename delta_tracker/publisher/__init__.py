"""Write what a tracker found to a stream, as versions, from all ranks.

Open ``publisher.py`` first: it has the public class. ``flight.py`` has the states of a version that is being
published, ``version_source.py`` reads one version from the tracker, ``row_gatherer.py`` copies its rows,
``coordinator.py`` writes parts and commits the manifest together with the other ranks.
"""
