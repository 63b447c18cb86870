"""Train adapters of ``peft`` without holding the model. They are injected, initialized, saved, and merged module by
module."""
