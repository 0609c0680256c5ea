"""Destinations of metrics and events.

Open ``base_sink.py`` first; it defines the base classes. Each destination has its own file. A sink that needs an
optional package imports it in its constructor.
"""
