"""Images in data: found, encoded and put into batches."""
