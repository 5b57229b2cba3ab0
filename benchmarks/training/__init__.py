"""Whole trainings with dpex's loader and with torch's: are they sooner done?

speed.py          the command: training with heavy preprocessing, images per second and what of the time is waited
pace.py           the process in which one loader is timed; steps.py: the training steps, with a GPU and without
photographs.py    the preprocessing; networks.py: ResNet-50
runs.py           the file of a run, and the kept ones; tables.py: the tables of the documents
"""
