"""Follow a stream and write its rows to a model that serves lookups.

Open ``predictor.py`` first: it defines the public class. ``reader.py`` contains the loop:
``delta_tracker/stream/reading/`` decides which version is applied next, and ``version_writer.py`` reads and validates
the chosen tables. ``served_model.py`` finds the tables of a model, ``placement.py`` maps rows
and columns of a version to them, ``model_writer.py`` writes one version under the lock of ``lock.py``, and
``follower.py`` defines the background thread. ``sink_writer.py`` writes to a row store instead of a model.
``delta_tracker/row_target.py`` defines the interface of a table, and ``delta_tracker/sinks/row_sink.py`` defines the
interface of a row store.
"""
