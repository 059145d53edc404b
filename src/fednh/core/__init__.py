"""A federated run and its rounds; README.md says in which order to read the files."""
