"""What passes between the blocks of a model, found out by running it without weights."""
