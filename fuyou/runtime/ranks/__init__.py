"""Exchanges between the ranks of a cluster, as the engine uses them."""
