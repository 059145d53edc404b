"""Speed and memory of fednh, measured on this machine as ratios: `make bench`."""
