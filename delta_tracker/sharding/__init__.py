"""What the other packages need from a sharded model. The only package that imports torchrec and fbgemm.

Open ``discover.py`` first: it finds the tables. ``kernel_hooks.py``, ``odist_hook.py`` and ``write_hooks.py`` report
lookups, updates and other writes; ``kernel_memory.py`` and ``weights.py`` read rows and optimizer states;
``refusals.py`` lists the optimizers that can be followed and refuses the rest; ``torchrec_api.py`` has every
attribute of torchrec that is used, with the differences between its versions.
"""
