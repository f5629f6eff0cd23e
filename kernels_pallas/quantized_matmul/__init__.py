"""Matmul by weights that stay quantized in memory: integers of 2 to 8 bits, FP8, NF4, MXFP4, GGUF's blocks."""
