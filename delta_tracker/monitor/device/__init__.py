"""Metrics that accumulate on a device and are read without synchronizing training with the device.

Open ``metrics.py`` first: it has sums, means and histograms. ``state.py`` copies them to the host, ``torchmetric.py``
does the same for metrics of torchmetrics, and ``syncs.py`` finds calls that wait for the device.
"""
