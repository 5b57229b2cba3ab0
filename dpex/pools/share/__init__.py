"""Batches shared by trainings of one machine: a process that makes each batch once, and the trainings' access to it."""
