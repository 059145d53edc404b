"""Differential privacy: what a release costs, where noise comes from, which methods a level allows."""
