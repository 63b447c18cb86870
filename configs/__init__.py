"""Presets as TOML: models, GPUs, drives, clusters. Read through ``importlib.resources``: they travel in the wheel."""
