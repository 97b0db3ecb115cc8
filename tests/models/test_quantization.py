"""int8 weights against rounding row by row, and what is refused."""

from __future__ import annotations

import pytest
import torch

from models.errors import UserError
from models.quantization import dequantized, quantized


def test_rows_are_rounded_to_multiples_of_their_scale() -> None:
    weight = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[4] *= 1e6
    tensors = {"a.weight": weight, "norm.weight": torch.ones(9), "d2t": torch.arange(7)}
    stored = quantized(tensors)
    assert stored.keys() == {"a.weight", "a.weight.scale", "norm.weight", "d2t"}
    assert stored["a.weight"].dtype == torch.int8 and stored["d2t"].dtype == torch.int64
    for row in range(7):
        largest = max(abs(x) for x in weight[row].tolist())
        scale = largest / 127 if largest else 1.0
        assert stored["a.weight.scale"][row].item() == pytest.approx(scale, rel=1e-6)
        for stored_now, value in zip(stored["a.weight"][row].tolist(), weight[row].tolist(), strict=True):
            assert stored_now == round(value / scale)
    found = dequantized(stored)
    assert found.keys() == tensors.keys()
    half = stored["a.weight.scale"][:, None] / 2
    assert ((found["a.weight"] - weight).abs() <= half * (1 + 1e-5)).all()
    assert (found["a.weight"] != weight).any(1).tolist() == [True, True, True, False, True, True, True]
    assert torch.equal(found["norm.weight"], tensors["norm.weight"]) and torch.equal(found["d2t"], tensors["d2t"])


def test_quantizing_again_changes_nothing() -> None:
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    once = dequantized(quantized({"w": weight}))
    torch.testing.assert_close(dequantized(quantized(once))["w"], once["w"], atol=0, rtol=1e-6)


@pytest.mark.parametrize("scale", [None, torch.ones(4), torch.ones(5, 1)])
def test_a_missing_or_misshapen_scale_is_refused(scale: torch.Tensor | None) -> None:
    stored = quantized({"w": torch.ones(5, 6)})
    del stored["w.scale"]
    if scale is not None:
        stored["w.scale"] = scale
    with pytest.raises(UserError, match=r"w\.scale is missing, or does not hold a number for each row of w"):
        dequantized(stored)
