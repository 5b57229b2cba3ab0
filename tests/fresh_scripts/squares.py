"""The dataset of a user."""

import os

import torch
from torch.utils.data import Dataset


class Squares(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([index, index * index, os.getpid()])


squares = Squares()
