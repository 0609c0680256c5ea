"""Adapters for other libraries.

Open the file of the library first: ``dcp.py`` for torch.distributed.checkpoint, ``lightning.py`` for Lightning.
"""
