"""A simulated loader on virtual time, in which the controller is judged: `python -m benchmarks.simulation`.

event_loop.py     virtual time, and resources that are shared on it
world.py          what a world consists of, and how it changes
simulator.py      the machine, the cluster and the training processes of a world
rank.py           one training process: loader, workers, consumer
window_counts.py  what is counted between two samples
steering.py       who sets the number of workers: a controller, or nobody
history.py        what a rank did
scenarios/        worlds by name, and what a controller must achieve in them
oracle.py         the best fixed settings of a scenario
scoreboard.py     the controller in every scenario beside these
baseline.py       what was achieved when last recorded
"""
