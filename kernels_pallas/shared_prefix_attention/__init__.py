"""Attention of requests whose contexts begin with the same pages."""
