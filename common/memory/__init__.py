"""Allocate host memory, and measure and limit it. A buffer is one mapping, on huge pages, on the GPU's NUMA node."""
