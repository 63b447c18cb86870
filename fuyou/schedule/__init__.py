"""A step as a list of tasks: which there are, which buffers they take, and how memory is divided among these."""
