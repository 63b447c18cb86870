"""Towers that turn images into input of a language model."""
