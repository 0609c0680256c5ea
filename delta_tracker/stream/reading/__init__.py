"""Readers of a log: what to apply next, decided by pure functions, and the loop around them.

Read ``decisions.py`` first, then ``decide.py`` with the rules, and ``reader.py`` with the loop. ``seen.py`` is what
the rules see of a log, ``source.py`` looks it up in a store. ``path.py`` finds the entries that lead to a version.
"""
