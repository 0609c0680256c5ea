"""Record which rows of a sharded model changed, and return a separate delta to each consumer.

Open ``tracker.py`` first: it has the public class, which delegates to the other modules. ``change_log.py`` has the log.
Its parts are ``log_writes.py`` (receives the ids of changed rows from the hooks), ``log_segments.py`` (keeps the rows
between two cuts) and ``log_consumers.py`` (reads them). ``store/`` has the row stores of the tables. ``modes.py``
defines the data that each tracking mode keeps for a row. ``cursors.py`` keeps the cursor of each consumer.
``delta_reader.py`` builds the deltas. ``hooks.py`` registers the hooks and counts the progress of training. A publisher
reads its consumer with ``consumer_handle.py`` and whole tables with ``live_tables.py``. ``checkpoint/`` saves and loads
the state. ``rank_group.py`` has the process groups for messages between ranks. From ``stream``, the package imports
only the encoding of states.
"""
