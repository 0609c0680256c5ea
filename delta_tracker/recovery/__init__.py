"""Restore the complete state of a training job from a stream.

Read ``restore.py`` first: it contains the steps of a restore. ``recovery_path.py`` finds the entries to apply, and the
rows that are pending for the consumers of the tracker afterwards. ``recovery_plan.py`` compares the version with the
job, and then writes to the model. It uses ``training_states.py`` to read the states of the ranks, ``job.py`` to compare
and load the states of objects, and ``targets.py`` to write rows. ``random_states.py`` restores the random generators.

``standby.py`` contains the standby, a job that takes over when the trainer fails. In a standby, ``shard_follower.py``
writes each version's rows on each rank. ``streams.py`` decides on rank 0 when to take over, and claims the streams.
"""
