"""Roles without a model, for benchmarks of the coordinator."""
