"""Progress lines, metrics, and the final report of a run."""
