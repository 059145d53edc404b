"""Differential privacy: what a release costs, where noise comes from, which methods a level allows.

noise.py draws noise; private_fit.py (gradients), private_data.py (counts and sums), clients.py (the server's mean) and
grid.py (secure sums) add it.
"""
