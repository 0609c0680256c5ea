"""Conformance kit of the stream format: cases that any reader of ``FORMAT.md`` has to pass. See ``README.md``."""
