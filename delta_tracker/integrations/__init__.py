"""Adapters for other libraries.

Read the library's file first: ``dcp.py`` for torch.distributed.checkpoint, ``lightning.py`` for Lightning.
"""
