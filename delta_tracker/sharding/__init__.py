"""The only package that imports torchrec and fbgemm: what of a sharded model the others need.

Open ``discover.py`` first: it finds the tables. ``kernel_hooks.py`` and ``write_hooks.py`` report which rows are
written, ``refusals.py`` lists what cannot be followed, ``versions.py`` has what differs between versions of torchrec.
"""
