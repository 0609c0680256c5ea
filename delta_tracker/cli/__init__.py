"""The command line ``delta-tracker``: what stands in a stream, for the people who run it. One file per command."""
