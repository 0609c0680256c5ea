"""Record which rows of a sharded model changed, and return a separate delta to each consumer.

Open ``tracker.py`` first: it has the public class, which delegates to the other modules. ``change_log.py`` receives
the ids of changed rows from the hooks. ``store/`` has the row stores, which keep these ids. ``modes.py`` defines the
data that each tracking mode keeps for a row. ``consumer_positions.py`` keeps the cursor of each consumer.
``delta_reader.py`` builds the deltas. ``consumer_handle.py`` is a publisher's access to its consumer. ``checkpoint/``
saves and loads the state. The package does not import ``stream``.
"""
