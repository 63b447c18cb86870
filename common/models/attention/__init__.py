"""Attention: its memory, and documents that share a row without seeing each other."""
