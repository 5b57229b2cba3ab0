"""Whole trainings with dpex's loader and with torch's: is a model as good as before, and is it trained sooner?

accuracy.py       the command: one small network, trained by all loaders on one device, with DataParallel and with DDP
trainer.py        the process in which one loader trains it, or the ranks of one
pictures.py       what it is trained on: FashionMNIST's files, else scikit-learn's digits
speed.py          the command: training with heavy preprocessing, images per second and what of the time is waited
pace.py           the process in which one loader is timed; steps.py: the training steps, with a GPU and without
photographs.py    the preprocessing; networks.py: the networks
runs.py           the file of a run, and the kept ones; tables.py: the tables of the documents
"""
