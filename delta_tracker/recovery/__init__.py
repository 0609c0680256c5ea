"""Restore the complete state of a training job from a stream. Read ``restore.py`` first.

``path.py`` finds the entries to apply: a snapshot and the versions after it. ``fit.py`` compares them with the job,
before anything is written, and ``warm_up.py`` checks the model. ``targets.py`` maps rows and their optimizer states to
the memory of the model. ``training_states.py`` reads the other states of the ranks, and ``pending.py`` finds the rows
that are pending for the consumers of the tracker. ``random_states.py`` saves and restores the global random generators.
"""
