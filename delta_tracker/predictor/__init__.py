"""Follow a stream and write its rows to a model that serves lookups.

Open ``predictor.py`` first: it defines the public class. ``reader.py`` contains the main loop, which chooses the next
version with ``delta_tracker/stream/reading/`` and applies it with ``version_writer.py``. ``served_model.py`` finds the
tables of a model, ``placement.py`` maps rows and columns of a version to these tables, and ``model_writer.py`` writes
the rows while it holds the lock that ``lock.py`` defines. ``sink_writer.py`` writes to a row store instead of a model.
``follower.py`` defines the background thread.
``delta_tracker/row_target.py`` defines the interface of a table, and ``delta_tracker/sinks/row_sink.py`` defines the
interface of a row store.
"""
