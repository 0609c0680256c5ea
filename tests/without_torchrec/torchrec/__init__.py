"""Stand-in that hides an installed torchrec: a directory on PYTHONPATH comes before the installed packages."""

raise ModuleNotFoundError("No module named 'torchrec'", name="torchrec")
