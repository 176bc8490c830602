"""Decoders over dense and Native Sparse Attention."""
