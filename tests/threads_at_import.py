"""A module as clients of storages and tokenizers are: its threads start at its import. A fork has none of them."""

from concurrent.futures import ThreadPoolExecutor

POOL = ThreadPoolExecutor(1)
POOL.submit(int, "1").result()
