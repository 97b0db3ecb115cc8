"""The `decode` group of a configuration, as the settings of the decode loop."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.draft_length import read_policy
from engine.settings import DecodeSettings
from models.errors import UserError
from models.sampling import SamplingParams
from models.tree import DynamicTree, StaticTree

CALIBRATED = "calibrated"  # the draft tree that an export holds


def decode_settings(
    decode: dict[str, Any],
    temperature: float,
    seed: int,
    num_speculative_tokens: int = 4,
    calibrated: dict[str, Any] | None = None,
) -> DecodeSettings:
    """Settings at one temperature. What an export says, `num_speculative_tokens` and its `calibrated` tree, is for a
    `decode` that leaves the number open or asks for that tree.

    Raises UserError for senseless values.
    """
    bias, own = decode["logit_bias"] or {}, decode["num_speculative_tokens"]
    try:
        biases = tuple((int(token), float(value)) for token, value in bias.items())
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"decode.logit_bias is {bias!r}: write token ids and numbers, as {{42: -1.5}}.") from error
    stop = [decode["stop"]] if isinstance(decode["stop"], str) else decode["stop"] or []
    if not all(isinstance(string, str) and string for string in stop):
        raise UserError(f"decode.stop is {stop!r}: give strings that are not empty, as ['\\n\\n'].")
    sampling = SamplingParams(
        temperature,
        decode["top_k"],
        decode["top_p"],
        decode["min_p"],
        decode["repetition_penalty"],
        biases,
    )
    return DecodeSettings(
        max_new_tokens=decode["max_new_tokens"],
        num_speculative_tokens=num_speculative_tokens if own is None else own,
        sampling=sampling,
        stop_strings=tuple(stop),
        seed=seed,
        tree=read_tree(decode["tree"], calibrated),
        children=decode["children"],
        verification=decode["verification"],
        draft_length=read_policy(decode["draft_length"]),
    )


def read_tree(given: Any, calibrated: dict[str, Any] | None = None) -> StaticTree | DynamicTree | None:
    """A draft tree from null, from its numbers, or from a JSON file of a static tree (`eval/tree.py` writes one).

    "calibrated" is the tree of an export, what `calibrated` holds. Raises UserError where that is none, for a file that
    does not hold a tree, and for unknown or missing numbers.
    """
    if given is None:
        return None
    if given == CALIBRATED:
        if calibrated is None:
            raise UserError(
                "decode.tree=calibrated, but there is no export that holds a draft tree: build one with eval/tree.py, "
                "and give its file."
            )
        given = {key: calibrated.get(key) for key in ("parents", "ranks")}
    if isinstance(given, str):
        try:
            found = json.loads(Path(given).read_text())
            given = {"parents": found["parents"], "ranks": found["ranks"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"decode.tree={given}: cannot read a draft tree from it ({error}).") from error
    if not isinstance(given, dict) or set(given) not in ({"depth", "top_k", "num_nodes"}, {"parents", "ranks"}):
        raise UserError(
            f"decode.tree is {given!r}: give depth, top_k and num_nodes, or parents and ranks, or eval/tree.py's file, "
            "or calibrated."
        )
    if "depth" in given:
        return DynamicTree(**given)
    for name in ("parents", "ranks"):
        if not isinstance(given[name], list):
            raise UserError(f"decode.tree: {name} is {given[name]!r}, but it must be a list of whole numbers.")
    return StaticTree(tuple(given["parents"]), tuple(given["ranks"]))


def describe_tree(tree: StaticTree | DynamicTree | None) -> dict[str, Any] | None:
    """The numbers that `read_tree` reads: what a run writes down, since a file may change."""
    return None if tree is None else {key: _plain(value) for key, value in asdict(tree).items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
