"""Example programs, one per feature."""
