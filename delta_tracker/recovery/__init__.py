"""Restore the complete state of a training job from a stream.

Read ``restore.py`` first: it contains the steps of a restore. ``recovery_path.py`` finds the entries to apply, and the
rows that are pending for the tracker's consumers after a restore. ``recovery_plan.py`` compares a version with the job
and writes the version to the model. ``training_states.py`` reads the states of the ranks, ``job.py`` compares and loads
the states of objects, and ``targets.py`` writes rows. ``random_states.py`` restores random generators.

``standby.py`` contains the standby, a job that takes over when the trainer fails. In a standby, ``shard_follower.py``
writes the rows of each version on each rank. ``streams.py`` decides on a takeover and claims the streams.
"""
