"""Stand-in that hides an installed fbgemm_gpu: a directory on PYTHONPATH comes before the installed packages."""

raise ModuleNotFoundError("No module named 'fbgemm_gpu'", name="fbgemm_gpu")
