"""Tests that provoke an error, do what its message says, and check that it helps; see tests/test_advice.py."""
