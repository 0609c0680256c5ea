"""Ways to find the entries of a log: by listing the store, or by the pointer object."""
