"""Proof by compilation: every kernel in every shape that the library claims, compiled for a GPU that is not here."""
