"""The computation of a step: forward and backward passes, visit by visit."""
