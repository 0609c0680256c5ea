"""Readers of a log: what to apply next, decided by pure functions, and the loop around them.

Open ``decisions.py`` first: it has the decisions and their rules. ``position.py`` and ``seen.py`` define what they
depend on, ``decide.py`` decides, and ``path.py`` finds the entries that lead to a version. ``reader.py`` is the loop:
it looks, decides and acts. ``orders.py`` keeps pins, releases and rollbacks, ``sources.py`` the urls, and ``source.py``
looks up in one of them what a decision needs: ``lineage.py`` the streams that a log continues, ``catch_up.py`` entries
that replace many versions, ``canary.py`` what a canary may apply. ``settling.py`` doubts faults over http, ``lag.py``
measures the lag, and ``runtime.py`` has the clock.
"""
