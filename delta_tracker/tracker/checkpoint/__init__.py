"""Save, load and reshard the state of a tracker: each consumer's pending rows and note, and registered counters.

Open ``tracker_checkpoint.py`` first: it implements the tracker's methods. ``rank_header.py`` defines and reads the
saved state of one rank. ``pack.py`` writes it. ``reshard.py`` finds the rows of a rank in the states of all ranks, for
any sharding plan. ``gather.py`` collects all ranks' states on rank 0. ``counters.py`` merges counters.
"""
