"""Save, load and reshard the state of a tracker: what is pending for each consumer, and the stream's position.

Open ``tracker_checkpoint.py`` first: it has what the tracker offers. A checkpoint of one rank is a ``part``; ``pack``
makes tensors of it, ``reshard`` gives its rows to the ranks of another sharding.
"""
