"""The tracker's state in a checkpoint: what each rank saves, and how it finds its rows again at any world size."""
