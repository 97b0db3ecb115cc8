"""How many tokens are drafted in a round: one file for each kind of policy."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from engine.draft_length.cost_aware import CostAware
from engine.draft_length.estimate import Estimate
from engine.draft_length.history import Fallback, Window
from engine.draft_length.laws import Confidence, Entropy
from engine.draft_length.learnt import Learnt
from engine.draft_length.policy import DraftLength, Fixed, Lengths, Round
from models.errors import UserError

__all__ = [
    "POLICIES",
    "Confidence",
    "CostAware",
    "DraftLength",
    "Entropy",
    "Estimate",
    "Fallback",
    "Fixed",
    "Learnt",
    "Lengths",
    "Round",
    "Window",
    "policy_for",
    "read_policy",
]

POLICIES: dict[str, type[DraftLength]] = {
    policy.name: policy for policy in (Fixed, Window, Confidence, Entropy, CostAware, Learnt, Estimate, Fallback)
}
AUTO = "auto"


def read_policy(given: Any) -> DraftLength | None:
    """A policy from its name, or from a mapping of its name (`policy`) and settings; None for "auto".

    Raises UserError for an unknown name or setting, and for senseless values.
    """
    arguments = {"policy": given} if isinstance(given, str) else given
    if not isinstance(arguments, dict) or "policy" not in arguments:
        raise UserError(f"decode.draft_length is {given!r}: choose {', '.join([AUTO, *POLICIES])}.")
    name, settings = arguments["policy"], {key: value for key, value in arguments.items() if key != "policy"}
    if name != AUTO and name not in POLICIES:
        near = difflib.get_close_matches(str(name), [AUTO, *POLICIES], n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise UserError(f"There is no decode.draft_length {name!r}.{meant} Choose {', '.join([AUTO, *POLICIES])}.")
    known = [] if name == AUTO else [f.name for f in fields(POLICIES[name]) if f.init]
    for key in settings:
        if key not in known:
            raise UserError(f"decode.draft_length={name} has no setting {key!r}; it has: {', '.join(known) or 'none'}.")
    return None if name == AUTO else POLICIES[name](**settings)


def policy_for(given: DraftLength | None, drafter: Any) -> DraftLength:
    """The policy that was asked for, else what the drafter came with: its predictor's, or a fixed length."""
    if given is not None:
        return given
    return Learnt() if hasattr(drafter, "length_predictor") else Fixed()
