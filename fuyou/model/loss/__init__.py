"""Compute losses from logits that never exist all at once. A mixture's router loss is summed over blocks."""
