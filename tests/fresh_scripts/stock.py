"""A script of plain PyTorch; prints whether the batches are right."""

from squares import Squares
from torch.utils.data import DataLoader

if __name__ == "__main__":
    torchs = DataLoader(Squares(), batch_size=4, num_workers=2)
    squares = [number for batch in torchs for number in batch[:, 1].tolist()]
    print("squares", squares == [n * n for n in range(40)])
