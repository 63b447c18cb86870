"""Presets as TOML: models, GPUs, clusters. Read through ``importlib.resources`` so that they travel in the wheel."""
