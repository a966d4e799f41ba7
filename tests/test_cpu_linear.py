"""The transposed product is the linear layer that it stands for, and changes nothing of the caller's model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gapless.model.adapter import TransformersModel
from gapless.model.products.cpu_linear import FewRowsLinear, quicken
from models import tiny


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 32, 33])
def test_equal_to_the_plain_layer(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(24, 40, bias=bias)
    quick = nn.Linear(24, 40, bias=bias)
    quick.weight, quick.bias = plain.weight, plain.bias
    assert quicken(quick) == 1
    assert type(quick) is FewRowsLinear
    x = torch.randn(1, rows, 24)
    with torch.no_grad():
        torch.testing.assert_close(quick(x), plain(x), rtol=1e-5, atol=1e-5)
        exchanged = x.transpose(1, 2).contiguous().transpose(1, 2)
        torch.testing.assert_close(quick(exchanged), plain(x), rtol=1e-5, atol=1e-5)


def test_the_caller_s_modules_stay_as_they_are() -> None:
    model = tiny("llama")
    wrapped = TransformersModel(model)
    assert not any(isinstance(m, FewRowsLinear) for m in model.modules())
    quick = [m for m in wrapped.module.modules() if isinstance(m, FewRowsLinear)]
    assert len(quick) == 3 * 7 + 1
    first = next(m for m in model.modules() if type(m) is nn.Linear)
    assert quick[0].weight.data_ptr() == first.weight.data_ptr()
    assert quick[0].weight is not first.weight


@pytest.mark.parametrize("changed", [nn.Linear(4, 4).half(), nn.Linear(4, 20000)])
def test_other_layers_are_left_alone(changed: nn.Linear) -> None:
    assert quicken(changed) == 0
    assert type(changed) is nn.Linear
