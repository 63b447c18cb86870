"""Choose what a block saves for its backward pass, and compute the rest again. Both follow a trace of its operators."""
