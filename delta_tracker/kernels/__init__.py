"""Sets of rows, in one engine per file: which rows of a shard changed."""
