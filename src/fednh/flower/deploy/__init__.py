"""Federations as processes: the programs of server and sites and their options, the proxy, and what may run where."""
