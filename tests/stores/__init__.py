"""Kit of failing, slow, stale, counting and clocked stores: rules around any store.

Start with ``wrapped.py``: a store that passes each operation through rules. ``rules.py`` has the rules.
"""
