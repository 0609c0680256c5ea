"""Forecast of memory, bytes, requests and start-up times before a stream is deployed. Read ``workload.py`` first.

``version_size.py`` computes the sizes of one version from the format, and ``forecast.py`` has the formulas of the
forecast.
"""
