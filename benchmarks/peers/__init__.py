"""The same round on other libraries, side by side with ours: `make bench-peers`."""
