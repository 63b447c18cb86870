"""Selective activation checkpointing: what a block saves for its backward pass, and what it computes again."""
