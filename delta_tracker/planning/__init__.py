"""Forecast of memory, traffic, requests and start-up time before a stream is deployed. Read ``workload.py`` first.

``forecast.py`` computes the sizes of a version from the format, and defines the formulas of the forecast.
"""
