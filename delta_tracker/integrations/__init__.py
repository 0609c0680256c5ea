"""Adapters for other libraries.

Open ``dcp.py`` first: it supports torch.distributed.checkpoint. ``lightning.py`` supports PyTorch Lightning, and
``aot_inductor.py`` supports compiled models.
"""
