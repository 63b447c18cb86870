"""Hugging Face models whose weights are never all in memory at once: their configurations, classes, and structure, what
a token costs, tiny models of the same family, checkpoints, adapters, attention, and vision towers."""
