"""Collectives as FSDP2 calls them: the all-gather, the reduction, and the rings and formats that they are made of.
Each runs level by level, and counts what it sends."""
