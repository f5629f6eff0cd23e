"""Attention of a ragged batch of tokens over a paged KV cache."""
