"""Speculative decoding on the device: verifying drafts, and models that make them."""
