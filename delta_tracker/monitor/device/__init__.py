"""Metrics that accumulate on a device. Recording and collecting do not synchronize training with the device.

Open ``metrics.py`` first: it defines sums, means and counters. ``device_state.py`` copies their values to the host.
"""
