"""Forecast of memory, traffic, requests and start-up time before a stream is deployed. Read ``workload.py`` first.

``forecast.py`` computes the size of a version from the file format, and defines the formulas of the forecast.
"""
