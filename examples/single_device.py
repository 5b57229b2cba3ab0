"""Train on one device, with workers of this machine or of a Ray cluster.

    python examples/single_device.py                      # with worker processes of this machine
    python examples/single_device.py --distribute-mode    # on the cluster that is connected, or a private Ray

The data are FashionMNIST where it is on disk (see `pictures.py`), else scikit-learn's digits, in batches of 100.
"""

from itertools import islice

import torch
from torch import nn

from dpex import DpexDataLoader
from options import parser, workers
from pictures import pictures


def small_network() -> nn.Module:
    """Return two convolution blocks and three linear layers; float32 (N, 1, 28, 28) to (N, 10) scores."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 6 * 6, 600), nn.Dropout(0.25), nn.Linear(600, 120), nn.Linear(120, 10)),
    )


def main() -> None:
    """Train, and print loss and accuracy after each epoch."""
    options = parser(__doc__, num_workers=2, distribute_mode=False, epochs=3).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = small_network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    loss_of = nn.CrossEntropyLoss()

    loader = DpexDataLoader(pictures(train=True), batch_size=100, shuffle=True, **workers(options))
    for epoch in range(options.epochs):
        right = seen = 0
        for images, labels in islice(loader, options.limit):
            images, labels = images.to(device), labels.to(device)
            scores = model(images)
            loss = loss_of(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((scores.argmax(1) == labels).sum())
            seen += len(labels)
        print(f"epoch {epoch + 1}: {seen} images, loss {loss.item():.3f}, accuracy {right / seen:.1%}")


if __name__ == "__main__":
    main()
