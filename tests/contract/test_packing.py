"""Several texts in a row: each drafter's training learns the same of them as of one text a row, or refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import hydra
import pytest
import torch

from data.loader import Batch, StepBatches
from models.errors import UserError
from models.target import Target
from models.types import packs
from models.vocab import DraftVocab
from tests.helpers.drafters import EXACT, build_shaken, prompts
from train.backbone import backbone_of
from train.pipeline import check_packing
from train.regime import Regime

LENGTHS, PROMPTS = [14, 9, 17, 20, 12, 8, 15, 24], [9, 3, 8, 10, 8, 2, 9, 11]
PACK = {"eagle", "eagle3", "hass", "medusa", "medusa2", "mtp", "mtp_cascaded", "mtp_hierarchical", "mtp_parallel"}


def batches(target: Target, batch_size: int, max_tokens: int) -> StepBatches:
    ids = prompts(LENGTHS, target.vocab_size)
    masks = [[0] * p + [1] * (n - p) for n, p in zip(LENGTHS, PROMPTS, strict=True)]
    rows = datasets.Dataset.from_dict({"token_ids": ids, "loss_mask": masks})
    return StepBatches(rows, batch_size, max_tokens, seed=0)


def learnt(module: Any, batch: Batch) -> tuple[dict[str, torch.Tensor], list[torch.Tensor | None]]:
    """What a step tells of a batch, and the gradients of what is trained."""
    module.zero_grad()
    told = module.joint_losses(batch, 0)
    told["loss"].backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    return {name: value.detach() for name, value in told.items()}, gradients


def test_packed_texts_teach_what_they_do_alone(options: dict[str, Any], target: Target, tmp_path: Path) -> None:
    training = options["drafter"]["training"]
    if training is None:
        pytest.skip("this drafter is not trained")
    target = backbone_of(training).adapt(target, seed=0)
    drafter = build_shaken(options["drafter"]["model"], target, DraftVocab(target.vocab_size))
    assert packs(drafter) == (options["drafter"]["name"] in PACK)
    if not packs(drafter):
        with pytest.raises(UserError, match=rf"data\.packing=true: {type(drafter).__name__}"):
            check_packing(drafter, None)
        return
    known = {"noise": 0.0} if "noise" in training else {}
    module = hydra.utils.instantiate(training | known, drafter, target, max_steps=8, seed=0)
    check_packing(drafter, module)
    assert isinstance(module, Regime)
    packed = batches(target, 1, 48)
    packed.pack(module.first_supervised)
    packed.batch_size = packed.num_rows
    both = packed[0]
    assert both.segments is not None and int(both.segments.max()) > 0 and len(both.token_ids) < len(LENGTHS)
    told, gradients = learnt(module, both)
    expected, wanted = learnt(module, batches(target, len(LENGTHS), 48)[0])
    assert told.keys() == expected.keys()
    torch.testing.assert_close(told["loss"], expected["loss"], **EXACT)
    for name, value in expected.items():  # what is logged is counted in float32
        assert float(told[name]) == pytest.approx(float(value), abs=1e-6), name
    assert any(gradient is not None and gradient.abs().max() > 1e-6 for gradient in wanted)
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, **EXACT)
    module.cache_states(packed, tmp_path)
    if (cached := packed[0].hidden) is not None:
        online = module.with_states(both).hidden
        for row, length in enumerate(both.lengths.tolist()):
            torch.testing.assert_close(cached[row, :length], online[row, :length], **EXACT)
