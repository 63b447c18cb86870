"""Collectives: all-gather, reduce-scatter, and the rings and formats that they are made of."""
