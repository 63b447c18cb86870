"""What a run shows and leaves: progress, metrics in files, its page, and its summary.

Nothing here changes a number of the training."""
