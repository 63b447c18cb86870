"""Sharding strategies: which ranks share parameters, gradients and optimizer states, and the routes between them.
A strategy is a name or three scopes; on a cluster's levels it becomes meshes, axes, and process groups."""
