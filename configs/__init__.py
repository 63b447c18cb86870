"""Presets as TOML: models, GPUs, drives. Read through ``importlib.resources`` so that they travel in the wheel."""
