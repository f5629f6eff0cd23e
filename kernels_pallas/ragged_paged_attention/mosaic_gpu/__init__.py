"""The Pallas Mosaic GPU backend: a decode kernel for rows of few tokens, a prefill kernel for the others."""
