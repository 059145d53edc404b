"""A real federation's folder, its keys, and its processes on this machine."""
