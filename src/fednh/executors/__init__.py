"""Who computes the clients of a round."""
