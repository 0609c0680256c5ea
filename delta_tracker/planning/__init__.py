"""Forecast of memory, bytes, requests and start-up times before a stream is deployed. Read ``workload.py`` first.

``forecast.py`` computes the sizes of a version from the format, and has the formulas of the forecast.
"""
