"""A profile of a machine that does not exist."""

from fuyou.planner.profiling import Profile

PROFILE = Profile(
    device="cpu", tokens=100, measured_tokens=100, block_parameters=1000, matmul_flops_per_second=1e12,
    embed_forward_seconds=0.001, block_forward_seconds=0.002, block_backward_seconds=0.008, block_finish_seconds=0.0,
    head_seconds=0.01, head_forward_seconds=0.003, embed_backward_seconds=0.002,
    upload_bytes_per_second=4e9, download_bytes_per_second=3e9, read_bytes_per_second=2e9, write_bytes_per_second=1e9,
    burst_write_bytes_per_second=3e9,
    commit_seconds=0.004, adam_parameters_per_second=2e8,
    adam_threads=1, measured_at=1e9, measured_in_seconds=5.0,
)  # fmt: skip
