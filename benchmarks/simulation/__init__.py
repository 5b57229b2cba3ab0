"""A simulated loader on virtual time, in which tuning is judged: `python -m benchmarks.simulation`.

event_loop.py     virtual time, and resources that are shared on it
world.py          what a world consists of, what is hostile in it, and how it changes
draws.py          random numbers by position: the same for everybody who plays a world
simulator.py      the machine, the cluster and the training processes of a world
rank.py           one training process: loader, workers, consumer
gpu.py            its GPU, and what CUDA events and NVML say of that
pool_counts.py    what its workers have made so far
tuning.py         windows and samples of it, by the tuner's own code
steering.py       who sets the number of workers: a law, or nobody
history.py        what a rank did
scenarios/        worlds by name, and what a law must achieve in them
generate.py       worlds by the hundred, from a seed: `--fuzz N --seed S`
families.py       worlds of three kinds that these seldom are
oracle.py         the best fixed settings of a scenario; kept.py: those that were found before
score.py          the law in a scenario, beside these; report.py: tables
baseline.py       what was achieved when last recorded
constants.py      the reference page of the law's constants
"""
