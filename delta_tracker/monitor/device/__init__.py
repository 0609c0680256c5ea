"""Metrics that accumulate on a device. Neither recording nor collecting makes training wait for the device.

Open ``metrics.py`` first: it defines sums, means and counters. ``device_state.py`` copies their values to the host.
"""
