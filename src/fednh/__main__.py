"""`python -m fednh`."""

from fednh.cli import main

main()
