"""Hardware: this machine's GPUs, drives and memory, and presets of others."""
