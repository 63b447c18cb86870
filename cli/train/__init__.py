"""Training runs: on one machine, on ranks in memory and on ranks out of core."""
