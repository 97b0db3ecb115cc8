"""Exports that are made of an export: what they say of themselves, and where they may be written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from models.checkpoint import native
from models.errors import UserError
from train.model_card import with_note


def successor(described: native.Export) -> native.Export:
    """What is said of a drafter that was made from an export: it has no int8 weights, and a target that
    lies in that export stays there.
    """
    target = {key: value for key, value in described.target.items() if key != "adapted"}
    return replace(described, int8=False, target=target)


def card_of(source: Path) -> str:
    """The model card of an export; nothing where it has none."""
    return (source / "README.md").read_text() if (source / "README.md").exists() else ""


def output_of(given: str | Path, source: Path, made_by: str) -> Path:
    """The folder that a command, `made_by`, may write, and replace, as a successor of the export in `source`.

    Raises UserError for that export itself, and for what is there already and no earlier result of the same command.
    """
    output = Path(given).expanduser().resolve()
    if output == source.resolve():
        raise UserError(f"output and export are one folder, {str(given)!r}: name another output.")
    if output.exists() and not (output.is_dir() and (not any(output.iterdir()) or _made_by(output) == made_by)):
        raise UserError(f"{str(given)!r} holds something else: name a folder that is not there yet.")
    return output


def _made_by(folder: Path) -> str | None:
    try:
        told: Any = native.read(folder).provenance.get("adaptation")
    except UserError:
        return None
    return told.get("made_by") if isinstance(told, dict) else None


def save(
    drafter: Any, described: native.Export, source: Path, output: Path, made_by: str, note: str, told: dict[str, Any]
) -> None:
    """Write the export of a drafter that the command `made_by` made of the one in `source`, which `described` tells of.

    The card gets the `note` above figures that are of the other one.
    """
    provenance = described.provenance | {"adaptation": {"made_by": made_by, **told}}
    card = with_note(card_of(source), note)
    native.save(drafter, replace(successor(described), provenance=provenance), drafter.vocab, output, card)
