"""What is written to disk, and how it stays whole."""
