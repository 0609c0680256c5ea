"""Adapters for other libraries: torch.distributed.checkpoint in ``dcp.py`` and Lightning in ``lightning.py``."""
