"""Sources of data: a file a kind; the registry is in `registry.py`."""
