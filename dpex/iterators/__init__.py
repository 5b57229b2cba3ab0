"""Iterators: what ``iter(loader)`` returns.

All are PyTorch's ``_BaseDataLoaderIter`` with other workers: length warnings, the base seed, the sampler and pinning
rules are PyTorch's own code.
"""
