"""Run any transformers model block by block. Parameters are there only while they are needed."""
