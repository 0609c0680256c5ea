"""Save, load and reshard the state of a tracker.

The state contains the pending rows and the note (a JSON value) of each consumer, and the registered counters.

Open ``tracker_checkpoint.py`` first: it implements the tracker's ``state_dict`` and ``load_state_dict``. ``part.py``
defines the format of one rank's saved state. It encodes the state and parses its header. ``reshard.py`` finds the rows
of a rank in the saved states of all ranks, even if the sharding plan has changed. ``collectives.py`` gathers the states
of all ranks on rank 0. ``counters.py`` merges counters.
"""
