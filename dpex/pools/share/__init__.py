"""Trainings of one machine share their batches: a process that makes each once, and the trainings' ends of it."""
