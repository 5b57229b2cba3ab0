"""Stands in for TensorFlow, which DLIO imports and does not use where the framework is PyTorch."""
