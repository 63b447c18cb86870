"""The planner of sharding strategies: what each costs in memory, bytes and time on a cluster, and which is fastest.
The same formulas are compared with what a run sends and with what the papers measured."""

from fcdp.planner.cluster import Cluster, cluster_names, load_cluster
from fcdp.planner.cost import Engine, Estimate, estimate
from fcdp.planner.search import StrategyPlan, admissible, plan
from fcdp.planner.workload import Collective, Workload, bytes_per_node, step_collectives

__all__ = [
    "Cluster",
    "Collective",
    "Engine",
    "Estimate",
    "StrategyPlan",
    "Workload",
    "admissible",
    "bytes_per_node",
    "cluster_names",
    "estimate",
    "load_cluster",
    "plan",
    "step_collectives",
]
