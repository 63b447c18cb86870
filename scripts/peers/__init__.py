"""The contenders of bench_peers.py and bench_max_model.py: each a small program, and what runs them."""
