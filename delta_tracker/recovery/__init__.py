"""Restore the complete state of a training job from a stream. Read ``restore.py`` first: it has the steps of a restore.

Before anything is written, ``recovery_path.py`` finds the entries to apply, a snapshot and the versions after it, and
the rows that are pending for the consumers of the tracker afterwards. ``recovery_plan.py`` compares the entries with
the job:

- ``training_states.py`` reads the training states of the ranks.
- ``job.py`` describes the job on this rank, and compares it with the version, also the states of its optimizers and
  schedulers.

Then ``recovery_plan.py`` writes the model, with ``targets.py`` for the rows and their optimizer states, and
``job.py`` loads the states of the user's objects. ``random_states.py`` saves and restores the global random
generators.

``standby.py`` is a job that takes the place of another one. Its ranks write rows with ``following.py``, and a takeover
ends with the restore of the rest. ``streams.py`` decides on rank 0 when to take over, claims the streams, and has the
metrics.
"""
