"""The model that the ranks train: built and sharded, given its weights, and run forward."""
