"""Tests of upgrades: the previous release beside the code of this checkout, and data that it wrote.

Open ``release.py`` first, which names the previous release.
"""
