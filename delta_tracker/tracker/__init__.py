"""Record which rows of a sharded model changed, and return a separate delta to each consumer.

Open ``tracker.py`` first: it has the public class, which delegates to the other modules. ``change_log.py`` records
the changes that hooks report in the stores of ``store/`` and compacts them. ``modes.py`` defines the data that each
tracking mode keeps of a row. ``consumer_positions.py`` keeps the cursor of each consumer. ``delta_reader.py`` builds
the deltas. ``consumer_handle.py`` is a publisher's access to its consumer. ``checkpoint/`` saves and loads the state.
The package does not import ``stream``.
"""
