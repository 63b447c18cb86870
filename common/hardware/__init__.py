"""The machine: GPUs, drives, memory, and presets of those that are not here."""
