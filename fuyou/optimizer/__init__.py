"""AdamW in a process of its own: split master weights, gradient clipping, absent and non-finite gradients."""
