"""Update weights in a separate process while the device computes. Master weights are split, and clipping is exact."""
