"""Personalised federated learning on class-imbalanced clients."""

__version__ = "0.1.0"
