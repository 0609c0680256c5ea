"""Known faults of TorchRec's delta tracker, as small cases that run against both trackers."""
