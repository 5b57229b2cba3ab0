"""Speed of DpexDataLoader beside PyTorch's DataLoader and others: `README.md` says how it is measured.

works/            the works, one subject a module: real loading code on data that is made here
tables.py         that data: files larger than the last-level cache
consumer.py       what every consumer does with a batch: reads each page, or copies it
course.py         one consumer from before iter() on: rate, waiting, what is left after learning, memory
contestants.py    who takes part, by name
rivals/           other loaders, in an environment of their own
actors.py         what people write by hand on Ray; cluster.py: raylets on this machine
measure.py        one measurement in a process of its own; process.py: that process; gpu.py: one that trains on a GPU
rows.py           the rows: which work, which consumer, which contestants
journal.py        the file of a run, a line for every measurement
runner.py         rounds of measurements; __main__.py: the command
results.py        median and range, ratios, the best of each side, the oracle
keep.py           a run that can be quoted becomes a file in results/
report.py         the tables of README.md and docs/benchmarks.md
others/           programs of others, unchanged: `make bench-others`
drills/, network/ trainings and links that tests break; sweep.py: what `share=` saves; soak.py: what grows
cached.py         caches of samples
objects.py        private memory of workers that read a dataset of Python objects
simulation/       the world in which the law is judged: `python -m benchmarks.simulation`
diagnosis.py      what a diagnosis foretells: `python -m benchmarks.diagnosis`
machine.py        what it was measured on: processor, caches, memory, versions, commit
"""
