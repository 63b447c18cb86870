"""A step as a list of tasks: what they do, which buffers they take, and how memory is divided among the buffers."""
