"""Record which rows of a sharded model changed, and return a separate delta to each consumer.

Open ``tracker.py`` first: it has the public class, which delegates to the other modules. ``change_log.py`` has the log,
whose parts are ``log_writes.py``, which receives the ids of changed rows from the hooks, ``log_segments.py``, which
keeps them between two cuts, and ``log_consumers.py``, which reads them. ``store/`` has the row stores of the tables.
``modes.py`` defines the data that each tracking mode keeps for a row. ``cursors.py`` keeps the cursor of each consumer.
``delta_reader.py`` builds the deltas. ``hooks.py`` registers the hooks, and has the progress of training, which a
publisher reads. It reads its consumer with ``consumer_handle.py``, and whole tables with ``live_tables.py``.
``checkpoint/`` saves and loads the state. ``rank_group.py`` has the process groups in which ranks exchange messages. Of
``stream``, the package imports the encoding of states only.
"""
