"""Follow a stream and write its rows into a model that serves lookups meanwhile.

Open ``predictor.py`` first: it has the public class. ``targets.py`` finds the tables of a model, ``apply.py`` writes
one version into them under the lock of ``lock.py``, ``follower.py`` is the thread that does so for every version.
"""
