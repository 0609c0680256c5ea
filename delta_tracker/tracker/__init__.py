"""Record which rows of a sharded model changed, and give each consumer its own delta.

Open ``tracker.py`` first: it has the public class. ``change_log.py`` is what its hooks write to, ``store/`` keeps the
rows of one shard, ``delta_reader.py`` builds what a consumer reads, ``checkpoint/`` saves all of it. May import
``sharding``, ``monitor`` and the base modules; not ``stream``.
"""
