"""Files of the project's own: written whole or not at all, presets, cached results, and the kernel's list of mounts."""
