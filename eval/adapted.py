"""How far a target that was trained together with its drafter is from the original, and what that means for a user.

S tokens of a text, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.target import Target


@torch.inference_mode()
def distance(original: Target, adapted: Target, texts: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Compare laws at temperature 1 on `texts`, each token ids and the length of the prompt in front of the answer.

    `kl` is the mean of KL(original ‖ adapted) over the answers' `positions`, in nats; `top1_agreement` is how often
    both have the same first choice.
    """
    kl, agree, positions = 0.0, 0, 0
    for ids, start in texts:
        log_p, log_q = (_laws(target, ids, start) for target in (original, adapted))
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        agree += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        positions += len(log_p)
    count = max(1, positions)
    return {"kl": kl / count, "top1_agreement": agree / count, "positions": positions}


def _laws(target: Target, ids: list[int], start: int) -> Tensor:
    """log p (S − start, V) of the answer's tokens, in double precision."""
    states = target(torch.tensor([ids], device=target.device)).last[0, start - 1 : -1]
    return target.head(states).double().log_softmax(-1)


def report(target: dict[str, Any]) -> str | None:
    """What an export's record of an adapted target says in plain words; None of a target that is the original."""
    found = target.get("adapted")
    if found is None:
        return None
    how = f"LoRA of rank {found['rank']}" if found["by"] == "lora" else "all weights"
    return (
        f"Decoding is lossless for the ADAPTED target, which was trained together with the drafter ({how}), and not "
        f"for the original {found['original']['name']!r}. On {found['positions']:,} tokens that the original says to "
        f"validation prompts, KL(original ‖ adapted) is {found['kl']:.3g} nats, and their first choices agree on "
        f"{found['top1_agreement']:.1%}."
    )
