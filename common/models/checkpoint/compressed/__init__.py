"""Read weights in fewer bits (FP8, MXFP4, compressed-tensors, bitsandbytes, GGUF). Each tensor is decoded alone."""
