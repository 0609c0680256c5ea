"""Destinations of metrics and events.

Open ``sink.py`` first; it defines the base class. Each destination has its own file. A sink that needs an
optional package imports it in its constructor. Several sinks use ``appended_file.py`` and ``steps.py``.
"""
