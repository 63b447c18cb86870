"""Adapters of ``peft``: made, filled, saved and merged without holding the model."""
