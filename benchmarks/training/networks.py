"""ResNet-50, so that torchvision is not needed."""

import torch
from torch import nn

IMAGENET_CLASSES = 1000
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of the blocks of ResNet-50's stages (He et al., 2015, table 1)."""
EXPANSION = 4
"""A block of ResNet-50 gives so many times its width."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; (N, `inputs`, H, W) to (N, 4 * `width`, H/stride, W/stride)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.main = nn.Sequential(
            *_convolved(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_convolved(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolved(width, outputs, 1),
        )
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_convolved(inputs, outputs, 1, stride))
        self.after = nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        summed: torch.Tensor = self.after(self.main(images) + self.shortcut(images))
        return summed


def _convolved(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet50() -> nn.Module:
    """ResNet-50 with the stride in the 3x3 convolution, as torchvision has it; (N, 3, 224, 224) to (N, 1000)."""
    blocks: list[nn.Module] = []
    inputs = STAGES[0][0]
    for number, (width, count) in enumerate(STAGES):
        for place in range(count):
            blocks.append(Bottleneck(inputs, width, 2 if number and not place else 1))
            inputs = EXPANSION * width
    stem = (*_convolved(3, STAGES[0][0], 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, IMAGENET_CLASSES))
