"""Interface to models and their tables. No other package imports torchrec or fbgemm.

Open ``discover.py`` first: it finds the tables. The hooks in ``kernel_hooks.py``, ``collection_hooks.py`` and
``replicas.py`` report lookups, updates and other writes. ``watcher.py`` contains their base class. ``kernel_memory.py``
and ``weights.py`` read rows and optimizer states. ``row_cache.py`` accesses rows that a kernel caches on a GPU.
``refusals.py`` lists the supported optimizers and rejects models that cannot be tracked. ``plain_tables.py`` and
``step_hook.py`` are for models without TorchRec's sharding. ``torchrec_api.py`` imports torchrec's classes and handles
the differences between its versions. ``inference_tables.py`` finds the tables of serving models. ``dmp_patch.py``
supports programs that were written for TorchRec's tracker.
"""
