"""What a run shows and leaves: progress, metrics in files and trackers, its page, its summary, and a model card.

Nothing here changes a number of the training."""
