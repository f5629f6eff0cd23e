"""The device side: batches, programs, sampling."""
