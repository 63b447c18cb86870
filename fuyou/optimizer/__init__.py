"""AdamW in a separate process: split master weights, gradient clipping, absent and non-finite gradients."""
