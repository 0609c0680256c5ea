"""Save, load and reshard the state of a tracker: what is pending for each consumer, and a note of its own for each.

Open ``tracker_checkpoint.py`` first: it has what the tracker offers. ``rank_header.py`` is the checkpoint of one rank,
``pack.py`` turns it into tensors, ``reshard.py`` gives its rows to the ranks of another sharding.
"""
