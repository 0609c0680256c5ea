"""Where metrics and events are delivered.

Open ``sink.py`` first: it has the protocol. There is one file for each destination, which imports its package when it
is built; ``appended_file.py`` and ``steps.py`` have what several of them share.
"""
