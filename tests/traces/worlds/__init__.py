"""Traces of random worlds."""
