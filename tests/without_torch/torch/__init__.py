"""Stand-in for an environment without torch: its folder comes first on the path."""

msg = "No module named 'torch'"
raise ModuleNotFoundError(msg, name="torch")
