"""The run on its drives: commits, resuming, moving to other drives or ranks, export, verification."""
