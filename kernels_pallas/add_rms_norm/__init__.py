"""A residual addition and the RMS norm that follows it."""
