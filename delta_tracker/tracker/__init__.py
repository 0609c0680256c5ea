"""Record which rows of a sharded model changed, and return a separate delta to each consumer.

Open ``tracker.py`` first: it contains the public class, which delegates to the other modules. ``change_log.py``
contains the log. Its parts are ``log_writes.py``, which receives the ids of changed rows from the hooks,
``log_segments.py``, which keeps the rows changed between two cuts, and ``log_consumers.py``, which reads these rows.
``store/`` contains the row stores of the tables. ``modes.py`` defines the data that each tracking mode keeps for a row.
``cursors.py`` keeps the cursor of each consumer. ``delta_reader.py`` builds the deltas. ``hooks.py`` registers the
hooks and counts batches and updates. A publisher uses ``consumer_handle.py`` to read changed rows, and
``live_tables.py`` to read whole tables. ``checkpoint/`` saves and loads the state. ``rank_group.py`` provides the
process groups for messages between ranks. From ``stream``, the package imports only the encoding of states.
"""
