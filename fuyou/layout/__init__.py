"""How a model's parameters lie: records, the order in which visits need them, and each rank's share."""
