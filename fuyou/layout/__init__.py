"""Lay a model's parameters out in records. A step visits them in a fixed order, and each rank has its share of every
one."""
