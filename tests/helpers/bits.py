"""Settings that change the last bits of sums, as other processors do.

``FINETUNE_TEST_BITS=avx2 pytest ...`` takes one, ``today`` another one of ``DAILY`` each day.
"""

import os
from datetime import date

NAME = "FINETUNE_TEST_BITS"
USUAL = {
    # Tests run side by side: with more threads each, they would wait for one another's cores.
    "OMP_NUM_THREADS": "1",
    # MKL's sums depend on where in memory a matrix begins (seen on AMD), and weights of a loaded checkpoint begin
    # anywhere.
    "MKL_CBWR": "AUTO,STRICT",
}
SETTINGS = {
    "usual": {},
    "scalar": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "mkl-avx2": {"MKL_CBWR": "AVX2,STRICT"},
    "onednn-avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "all-avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2,STRICT", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "two-threads": {"OMP_NUM_THREADS": "2"},
}
# Those that have passed. With `scalar`, attention in bf16 fails inside PyTorch 2.13 on processors with AMX.
DAILY = ("usual", "all-avx2", "two-threads")


def variables() -> dict[str, str]:
    """Return what to set in the environment before torch is imported, for the setting that ``FINETUNE_TEST_BITS``
    names."""
    name = os.environ.get(NAME, "usual")
    if name == "today":
        name = DAILY[date.today().toordinal() % len(DAILY)]
    if name not in SETTINGS:
        raise ValueError(f"{NAME}={name}: known are {', '.join(SETTINGS)}, and today")
    return USUAL | SETTINGS[name] | {NAME: name}  # what is started after midnight has the same


def threads() -> int:
    """Return how many threads PyTorch has in tests."""
    return int(os.environ["OMP_NUM_THREADS"])
