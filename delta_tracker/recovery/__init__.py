"""Restore the complete state of a training job from a stream. Read ``restore.py`` first: it has the steps of a restore.

``recovery_path.py`` finds the entries to apply, and the rows that are pending for the consumers of the tracker
afterwards. ``recovery_plan.py`` compares the entries with the job, and then writes the model. It uses
``training_states.py`` to read the states of the ranks, ``job.py`` to compare and load the states of objects, and
``targets.py`` to write rows. ``random_states.py`` has the global random generators.

``standby.py`` has the job that replaces another one: ``shard_follower.py`` writes the rows of the versions on each
rank, and ``streams.py`` decides on rank 0 when to take over, and claims the streams.
"""
