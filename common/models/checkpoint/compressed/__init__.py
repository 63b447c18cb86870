"""Read checkpoints whose weights have fewer bits: FP8, MXFP4, and compressed-tensors. Each tensor is decoded alone."""
