"""What ``scripts/gpu_check.py`` checks and measures: one section per file, each run in a separate process."""
