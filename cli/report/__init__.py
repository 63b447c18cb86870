"""What a run shows: progress lines, metrics, the report at the end."""
