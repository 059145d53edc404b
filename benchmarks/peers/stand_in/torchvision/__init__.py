"""A stand-in for torchvision's import, which FedLab insists on: no CPU build of it fits the torch that is tested here.

FedLab's data sets use it when they are made; this benchmark makes none of them.
"""
