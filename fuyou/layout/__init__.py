"""Layout of a model's parameters: records, the order in which a step visits them, and each rank's share."""
