"""Rules for what a reader of a log applies next. The loop that applies it is ``delta_tracker/predictor/reader.py``.

Open ``decide.py`` first: it has the decisions and their rules. ``position.py`` and ``seen.py`` define what they depend
on, and ``path.py`` finds the entries that lead to a version. ``orders.py`` keeps pins, releases and rollbacks.
``source.py`` has the urls and reads their logs, ``catch_up.py`` finds entries that replace many versions, and
``canary.py`` finds the versions that a canary may apply. ``settling.py`` delays the reaction to faults over http, and
``runtime.py`` has the clock.
"""
