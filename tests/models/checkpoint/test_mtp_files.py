"""Modules inside the target's checkpoint: norms that are stored as weight − 1, and a file that is read in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from models.checkpoint import format_of, layout, native
from models.drafter.mtp import SequentialMTP
from models.errors import UserError
from models.target import Target
from models.vocab import DraftVocab
from tests.helpers import formats
from tests.helpers.drafters import shaken, tiny_target
from tests.helpers.formats import CASES, MTP, edited, edited_config

NAME = "qwen3_next_mtp"


def with_norms(target: Target, values: Any) -> SequentialMTP:
    """A drafter whose norms have weights `values(size)`."""
    drafter = shaken(SequentialMTP(target, DraftVocab(target.vocab_size), hide_first=False))
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if "norm" in name:
                weight.copy_(values(len(weight)))
    return drafter


def save(drafter: SequentialMTP, target: Target, folder: Path) -> None:
    place = {"name": target.name, "fingerprint": target.fingerprint, "load": {}}
    model = {"_target_": MTP, "hide_first": False}
    format_of(NAME).save(drafter, target, native.Export("mine", model, place, 3, {}), folder, "")


def far_from_one(size: int) -> Tensor:
    weights = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 3
    weights[:4] = torch.tensor([0.0, 1e-3, -1e-3, 1 / 3])
    return weights


@pytest.mark.parametrize("values", [far_from_one, lambda size: 0.5 + torch.rand(size)], ids=["far from 1", "near 1"])
def test_centred_norms_come_back_exactly(values: Any, tmp_path: Path) -> None:
    """Near 1 in the drafter's own dtype, and elsewhere in float64: float32's 1 + (w − 1) is no w there."""
    target = tiny_target(torch.float32)
    drafter = with_norms(target, values)
    save(drafter, target, tmp_path / "made")
    state = format_of(NAME).load(tmp_path / "made", target).state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in drafter.state_dict().items())
    stored = load_file(tmp_path / "made" / "model.safetensors")
    wide = {name for name, tensor in stored.items() if tensor.dtype == torch.float64}
    assert wide == ({name for name in stored if "norm" in name} if values is far_from_one else set())


def test_weights_that_no_float_gives_back_are_refused(tmp_path: Path) -> None:
    target = tiny_target(torch.float64)
    with pytest.raises(UserError, match=r"cannot hold blocks\.0\.\S*norm.*: it stores weight − 1"):
        save(with_norms(target, lambda size: torch.full((size,), 0.1, dtype=torch.float64)), target, tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_published_centred_norms_are_not_rounded(tmp_path: Path) -> None:
    """1.003 in bfloat16 is 1."""
    target = tiny_target(torch.float32)
    save(with_norms(target, torch.ones), target, tmp_path / "made")
    (tmp_path / "made" / layout.RECORD).unlink()

    def publish(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()
            if "norm" in name:
                tensors[name].fill_(0.003)

    edited(tmp_path / "made", "model.safetensors", publish)
    edited_config(tmp_path / "made", lambda config: config.update(dtype="bfloat16", torch_dtype="bfloat16"))
    state = format_of(NAME).load(tmp_path / "made", target).state_dict()
    wanted = 1 + float(torch.tensor(0.003, dtype=torch.bfloat16))
    norms = [weight for name, weight in state.items() if "norm" in name]
    assert len(norms) == 5 and all(torch.equal(w, torch.full_like(w, wanted)) for w in norms)


def test_a_stitched_targets_own_tensors_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.save and case.format == "deepseek_mtp")
    formats.save(case, tmp_path / "made")
    read: list[str] = []

    class Counting:
        """A file that remembers which tensors were asked for."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = safe_open(*args, **options)

        def __enter__(self) -> Counting:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            return self.file.get_tensor(name)

    monkeypatch.setattr(native, "safe_open", Counting)
    format_of(case.format).load(tmp_path / "made", formats.target_of(case.target))
    assert sorted(read) == sorted(load_file(tmp_path / "made" / "model-mtp.safetensors"))
