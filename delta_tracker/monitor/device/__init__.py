"""Metrics that live on a device, and are read without making training wait.

Open ``metrics.py`` first: it has sums, means and histograms. ``state.py`` copies them to the host, ``torchmetric.py``
does the same for any metric of torchmetrics, ``syncs.py`` finds calls that wait for the device.
"""
