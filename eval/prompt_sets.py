"""Which prompts a measurement runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.prompts import BUILTIN, Prompt, SplitSizes, StandardLibrary, read_prompts, split_prompts
from engine.options import CALIBRATED
from models.errors import UserError
from models.target import Target

_STDLIB_PROMPTS = 32


def prompt_set(name: str, target: Target, limit: int | None, seed: int = 0) -> list[Prompt]:
    """The prompts called `name`: "builtin", "stdlib" (its test split), a JSONL file, or "auto".

    "auto" is the built-in set for a target with a chat template, else the standard library. `limit` keeps that many,
    spread evenly over the categories. Raises UserError for a file that does not exist or does not parse.
    """
    if limit is not None and limit < 1:
        raise UserError(f"num_prompts is {limit}: it must be at least 1, or null for all.")
    if name == "auto":
        name = "builtin" if getattr(target.tokenizer, "chat_template", None) else "stdlib"
    if name == "stdlib":
        sizes = SplitSizes(0, 0, limit or _STDLIB_PROMPTS)
        return split_prompts(StandardLibrary().prompts(target, sizes.total, seed), sizes)["test"]
    if name != "builtin" and not Path(name).exists():
        raise UserError(f"prompts={name}: there is no such file; choose auto, builtin, stdlib or a JSONL file.")
    prompts = list(read_prompts(BUILTIN if name == "builtin" else Path(name)))
    return prompts if limit is None else _spread(prompts, limit)


def without_fitted(prompts: list[Prompt], tree: Any, calibrated: Sequence[dict[str, Any] | None] = ()) -> list[Prompt]:
    """The prompts that a draft tree was not built on, where `tree` is a file of eval/tree.py; else all of them.

    `calibrated` are the trees of the exports, for a `tree` that means these. Raises UserError where none is left.
    """
    if not isinstance(tree, str):
        return prompts
    if tree == CALIBRATED:
        fitted = {prompt_id for held in calibrated if held for prompt_id in held.get("prompt_ids", [])}
    else:
        try:
            fitted = set(json.loads(Path(tree).read_text()).get("prompt_ids", []))
        except (OSError, ValueError, AttributeError) as error:
            raise UserError(f"decode.tree={tree}: cannot read a draft tree from it ({error}).") from error
    left = [prompt for prompt in prompts if prompt.id not in fitted]
    if not left:
        raise UserError(
            f"The draft tree {tree} was built on all of these {len(prompts)} prompts: measure on others (prompts=FILE)."
        )
    if len(left) < len(prompts):
        print(f"{len(prompts) - len(left)} of {len(prompts)} prompts are left out: the tree {tree} was built on them")
    return left


def _spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    """Take prompts from the categories in turn."""
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    longest = max(map(len, by_category.values()))
    dealt = [group[i] for i in range(longest) for group in by_category.values() if i < len(group)]
    return dealt[:limit]
