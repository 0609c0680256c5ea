"""Which rows of a shard changed, kept in a fixed amount of memory."""
