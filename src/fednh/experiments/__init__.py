"""Many runs: sweeps, estimates of their time, trackers, and the paper's spiral."""
