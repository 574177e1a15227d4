import pytest
import torch
from pydantic import ValidationError
from torch import nn

from models.config import ProjectorConfig
from models.network import build_projector


def test_is_the_authors_head() -> None:
    head = build_projector(ProjectorConfig(), feature_dim=32)
    assert [type(layer) for layer in head] == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Linear]
    assert {name: tuple(value.shape) for name, value in head.named_parameters()} == {
        "0.weight": (512, 32),
        "0.bias": (512,),
        "1.weight": (512,),
        "1.bias": (512,),
        "3.weight": (128, 512),
    }
    assert head(torch.randn(4, 32)).shape == (4, 128)


@pytest.mark.parametrize("dim", [127, 1])
def test_a_projection_holds_whole_points(dim: int) -> None:
    with pytest.raises(ValidationError, match=rf"dim = {dim}, expected an even number such as .* points \(x, y\)"):
        ProjectorConfig(dim=dim)


@pytest.mark.parametrize("sizes", [{"hidden": 0}, {"dim": 0}, {"dim": -2}])
def test_sizes_are_positive(sizes: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        ProjectorConfig(**sizes)
