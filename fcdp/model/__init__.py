"""The model that the ranks train: built and sharded, given its weights, run forward, and exported.
Each rank reads and holds its own rows alone."""
