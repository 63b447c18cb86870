"""Rows of packed tokens: how documents are packed, the file that holds them, and the order in which they are drawn."""
