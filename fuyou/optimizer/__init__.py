"""AdamW in a process of its own, with split master weights, clipping and gradients that may be absent."""
