"""Where blocks compute: a GPU or the CPU."""
