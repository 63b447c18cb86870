"""Find what passes between the blocks of a model, by running it without weights. Gradients take the same way back."""
