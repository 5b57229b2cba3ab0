"""See how an error in the dataset reaches the training loop: as the same exception, with the worker's traceback.

    python examples/dataset_error.py
    python examples/dataset_error.py --distribute-mode    # from a worker on the Ray cluster

As in PyTorch, the loop can catch the exception by its type, and the message shows where in the dataset it was raised.
"""

import sys

import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from options import parser, workers


class Broken(Dataset[torch.Tensor]):
    """1,000 samples, none of which can be loaded."""

    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index / 0)


def main() -> int:
    """Return 0 if the training loop caught the dataset's error, else 1."""
    options = parser(__doc__, num_workers=2, distribute_mode=False).parse_args()
    loader = DpexDataLoader(Broken(), batch_size=100, **workers(options))
    try:
        next(iter(loader))
    except ZeroDivisionError as error:
        print(f"The training loop caught a {type(error).__name__} with this message:\n\n{error}")
        return 0
    print("The training loop caught no error.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
