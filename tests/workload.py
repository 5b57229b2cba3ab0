"""Work that takes time and nothing else: what a test puts in the place of reading, decoding and training.

Use it where the time itself is what the test is about: a sample that is waited for as for a disk, a step in which a GPU
would be at work. Loaders, workers and training loops of these tests are real threads and processes, for which there is
no virtual time. To wait until something has happened use `waiting.until`; where workers must be at work at the same
time, `waiting.meet`. ruff fails on every other sleep in the tests (`ruff.toml`).
"""

import time

wait_as_work = time.sleep
"""Take so many seconds without using a CPU or holding the interpreter. It is `time.sleep` by another name, and no
function around it: datasets travel by value to workers on a Ray cluster, which can import `time` and nothing of the
tests."""
