"""Kernels for kvx's hot loops: a folder an op, each with a reference that specifies it. Imports nothing from kvx."""
