"""Destinations of metrics and events.

Open ``sink.py`` first; it defines the protocol. Each destination has its own file. A sink imports the
package of its destination in its constructor. ``appended_file.py`` and ``steps.py`` are shared by several sinks.
"""
