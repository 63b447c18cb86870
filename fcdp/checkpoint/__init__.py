"""Commits of a training on several nodes: the state of all ranks in one folder, which any number of ranks can load.
A commit is whole or absent, and every byte of it has a checksum."""
