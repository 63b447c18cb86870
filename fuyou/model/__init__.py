"""Running any transformers model block by block, with parameters that are there only while they are needed."""
