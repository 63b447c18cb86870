"""Sharding strategies: which ranks share parameters, gradients and optimizer states, and the routes between them."""
