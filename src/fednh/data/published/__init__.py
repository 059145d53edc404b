"""Published data sets in their published formats, and their download."""
