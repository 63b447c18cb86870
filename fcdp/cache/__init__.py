"""Parameters cached in host memory: what is kept where, and whether it is still right."""
