"""Matmul of rows sorted by group, each group with a matrix of its own."""
