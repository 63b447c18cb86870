"""What scripts/sweep_families.py is made of."""
