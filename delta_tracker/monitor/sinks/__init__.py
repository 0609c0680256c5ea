"""Destinations of metrics and events.

Open ``sink.py`` first; it defines the base class. Each destination has its own file. The constructor of a sink imports
the package of the destination. Several sinks use ``appended_file.py`` and ``steps.py``.
"""
