"""What a run leaves on its drives: commits, resuming, moving to other drives or ranks, export."""
