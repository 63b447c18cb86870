"""Presets as TOML: models, GPUs. Read through ``importlib.resources`` so that they travel in the wheel."""
