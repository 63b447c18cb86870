"""Read and write checkpoints on disk, in the memory of about one parameter. Formats are converted and decompressed on
the way."""
