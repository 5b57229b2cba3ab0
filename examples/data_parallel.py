"""Use the loader with nn.DataParallel, which splits each batch among the GPUs of this machine.

    python examples/data_parallel.py
    python examples/data_parallel.py --distribute-mode    # workers on the Ray cluster

The data are 30 random rows of 5 floats in one batch of 30, the model is a linear layer from 5 to 2. Without a GPU,
DataParallel runs the layer as it is.
"""

from itertools import islice

import torch
from torch import nn
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from options import parser, workers


class RandomRows(Dataset[torch.Tensor]):
    """`length` random rows of `size` floats."""

    def __init__(self, size: int, length: int) -> None:
        self.rows = torch.randn(length, size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def main() -> None:
    """Print the shapes of what goes into the layer and what comes out."""
    options = parser(__doc__, num_workers=2, distribute_mode=False).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.DataParallel(nn.Linear(5, 2)).to(device)
    loader = DpexDataLoader(RandomRows(5, 30), batch_size=30, shuffle=True, **workers(options))
    for epoch in range(options.epochs):
        for rows in islice(loader, options.limit):
            output = model(rows.to(device))
            print(f"epoch {epoch + 1}: input {tuple(rows.shape)}, output {tuple(output.shape)}")


if __name__ == "__main__":
    main()
