"""Training data with images: found, encoded and put into batches."""
