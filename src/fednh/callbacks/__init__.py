"""What is called during a run: the screen, and trackers of experiments."""
