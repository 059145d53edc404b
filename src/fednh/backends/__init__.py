"""Executors: they compute the clients of a round."""
