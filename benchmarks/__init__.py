"""Speed of DpexDataLoader beside PyTorch's DataLoader: `python -m benchmarks --help`.

Each measurement is a fresh process (`measure`), contestants take turns within a round (`runner`), and a
row's figure is the median over rounds of the ratio within a round, so that a machine that slows down for a
minute slows both sides.

    work.py jpeg.py   the datasets: what one sample costs
    loaders.py        the contestants: a work, an engine and a number of workers become an iterable
    actors.py         what people write by hand on Ray: one actor call per batch
    measure.py        one measurement in a process of its own
    cluster.py        a Ray cluster of two raylets on this machine
    rows.py           the table: which work, which contestants, which target
    runner.py         rounds and ratios
    report.py         the printed table and the JSON file
    course.py         one consumer from its first moment on: rate, stall, when it is settled
    oracle.py         the rows of num_workers="auto", and how it is judged beside all fixed counts
    screen.py         a short look at many fixed counts, so that only the best are measured at full length
    autorunner.py     rounds of these rows
    autoreport.py     their part of the table and of the file
    overhead.py       what metrics cost, a program of its own: `python -m benchmarks.overhead`
    machine.py        what it was measured on: processor, memory, versions
"""
