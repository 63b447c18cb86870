"""Adapters of ``peft``: injected, initialised, saved and merged without holding the model."""
