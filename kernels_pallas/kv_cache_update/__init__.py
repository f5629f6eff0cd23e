"""Writing new keys and values into a paged KV cache."""
