"""Adapters for other libraries.

Open ``dcp.py`` first: it supports torch.distributed.checkpoint. ``lightning.py`` supports Lightning.
"""
