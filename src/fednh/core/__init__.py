"""What a federated run is: README.md says in which order to read."""
