"""On which processors the same sums are rounded in the same way."""

import torch

ALIGNED_ALIKE = "AVX512" in torch.backends.cpu.get_cpu_capability()
"""Whether products with some of several matrices equal those with all. Without AVX-512, last bits depend on how many
there are and where in memory they begin, in bf16 above all (seen on AMD EPYC with AVX2), under any MKL_CBWR."""
