"""Destinations of metrics and events.

Open ``base_sink.py`` first: it defines the base classes. Each other file contains the sinks of one destination. A sink
that needs an optional package imports the package in its constructor.
"""
