"""ResNets of torchvision (He et al. 2015): the same names, starting weights and results.

Written out, since torchvision loads torch's compiler: `import torchvision` takes nearly as long as `import torch`.
"""

from __future__ import annotations

from typing import ClassVar, Final

from torch import Tensor, nn

LAYERS: Final = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
"""Blocks in each of the four layers."""


class Block(nn.Module):
    """A residual block: two 3 x 3 convolutions, or as a `bottleneck` 1 x 1, 3 x 3 and 1 x 1, with four times the width.

    The first 3 x 3 convolution has the stride.
    """

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None, *, bottleneck: bool) -> None:
        super().__init__()
        widths = (width, width, 4 * width) if bottleneck else (width, width)
        kernels, strides = ((1, 3, 1), (1, stride, 1)) if bottleneck else ((3, 3), (stride, 1))
        for number, (outputs, kernel, by) in enumerate(zip(widths, kernels, strides, strict=True), start=1):
            setattr(self, f"conv{number}", _convolution(inputs, outputs, kernel, by))
            setattr(self, f"bn{number}", nn.BatchNorm2d(outputs))
            inputs = outputs
        self.relu, self.downsample, self._last = nn.ReLU(inplace=True), downsample, len(widths)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C', H / stride, W / stride)."""
        found = x
        for number in range(1, self._last + 1):
            found = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(found))
            if number < self._last:
                found = self.relu(found)
        found += x if self.downsample is None else self.downsample(x)
        result: Tensor = self.relu(found)
        return result


class ResNet(nn.Module):
    """Images (N, 3, H, W), normalised, to pooled features (N, `feature_dim`)."""

    layer1_width: ClassVar = 64

    def __init__(self, name: str) -> None:
        super().__init__()
        bottleneck = name not in ("resnet18", "resnet34")
        self.conv1, self.bn1 = _convolution(3, 64, 7, 2), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        inputs = 64
        for number, count in enumerate(LAYERS[name], start=1):
            width, blocks = self.layer1_width << number - 1, list[nn.Module]()
            outputs = width * (4 if bottleneck else 1)
            for stride in (1 if number == 1 else 2, *[1] * (count - 1)):
                shortcut = None
                if stride > 1 or inputs != outputs:
                    shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
                blocks.append(Block(inputs, width, stride, shortcut, bottleneck=bottleneck))
                inputs = outputs
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.feature_dim = inputs
        nn.Linear(inputs, 1000)  # torchvision's classifier, so that its random numbers are drawn
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, feature_dim)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        pooled: Tensor = nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)
        return pooled


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
