"""Rules that determine what a reader applies next. ``delta_tracker/predictor/reader.py`` contains the loop.

Open ``decide.py`` first: it defines the decisions and their rules. ``position.py`` and ``seen.py`` define their inputs,
and ``path.py`` finds the entries that lead to a version. ``orders.py`` stores pins, releases and rollbacks.
``source.py`` reads the logs at the urls, ``catch_up.py`` finds entries that replace many versions, and ``canary.py``
finds the versions that a canary may apply. ``fault_delay.py`` delays the reaction to faults over http; ``runtime.py``
defines the clock.
"""
