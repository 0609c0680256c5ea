"""Follow a stream and write its rows into a model while it serves lookups.

Open ``predictor.py`` first: it has the public class. ``targets.py`` finds the tables of a model, ``placement.py``
decides which rows and columns each of them takes, ``apply.py`` writes one version under the lock of ``lock.py``,
``follower.py`` is the thread that does so for every version. What a table must offer is
``delta_tracker/row_target.py``.
"""
