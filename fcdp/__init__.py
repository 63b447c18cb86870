"""Many nodes: sharding strategies, host-cached parameters, collectives and their planner.

Nothing is here yet: single-node out-of-core training (``fuyou``) comes first.
"""
