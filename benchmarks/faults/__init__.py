"""The known faults of TorchRec's own delta tracker, each as a small case that both trackers run."""
