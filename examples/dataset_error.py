"""An error in the dataset reaches the training loop as itself, with the worker's traceback.

python examples/dataset_error.py
python examples/dataset_error.py --distribute-mode    # the same from a worker on the Ray cluster
"""

import sys

import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from options import parser


class Broken(Dataset[torch.Tensor]):
    """1,000 samples, none of which can be had."""

    def __len__(self) -> int:
        return 1_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index / 0)


def main() -> int:
    """0 if the error came through."""
    options = parser(__doc__, num_workers=10, distribute_mode=False).parse_args()
    loader = DpexDataLoader(
        Broken(),
        batch_size=100,
        num_workers=options.num_workers,
        distribute_mode=options.distribute_mode,
        head_address=options.head_address,
    )
    try:
        next(iter(loader))
    except ZeroDivisionError as error:
        print(f"the loop caught a {type(error).__name__}, which says:\n\n{error}")
        return 0
    print("no error came through", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
