"""How far rounding alone moves a result, and on which processors the same sums are rounded in the same way."""

import math

import torch

ALIGNED_ALIKE = "AVX512" in torch.backends.cpu.get_cpu_capability()
"""Whether products with some of several matrices equal those with all. Without AVX-512, last bits depend on how many
there are and where in memory they begin, in bf16 above all (seen on AMD EPYC with AVX2), under any MKL_CBWR."""


def fp32_sum_rounding(total: float, terms: int) -> float:
    """Return how far apart two fp32 sums of the same ``terms`` numbers may be, added in different orders.

    Each level of a pairwise sum rounds by at most half of an ulp of the numbers' absolute ``total`` (Higham 1993), and
    so does the computation of the numbers.
    """
    return 2 * (math.log2(terms) + 1) * 2**-24 * abs(total)
