"""What a layer does between its QKV matmul and attention: QK-norm, rotary embedding, and the write to the KV cache."""
