"""Trainings in processes of their own, which tests watch while they make a fault happen."""
