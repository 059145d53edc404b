"""One federated run: the round loop and what it is made of."""
