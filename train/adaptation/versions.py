"""Versions of a drafter: exports that are written once, one of which is the current; and how a running engine changes.

    versions/000007/   an export as any other
    current            a link to the version that is served, exchanged in one step

A reader that opens the link reads one version whole, since a version never changes and is deleted only when `keep`
newer ones are there. (`models.checkpoint.native.load` follows the link once, before it opens the first file.)
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from engine.observer import Checked, Observer
from models.checkpoint import native
from models.errors import UserError
from models.files import explain_disk_errors
from train.adaptation.learner import Weights
from train.adaptation.successors import successor
from train.model_card import with_note

_NAME = re.compile(r"\d{6}")


@dataclass(frozen=True)
class VersionsSettings:
    """How many of the newest versions stay, beside the first."""

    keep: int = 4

    def __post_init__(self) -> None:
        if self.keep < 2:
            raise UserError(
                f"adaptation.versions.keep is {self.keep}: at least 2, since readers may be in the last one."
            )


class Versions:
    """The versions in `folder`, of the drafter that `described` tells of, and beside them `deltas` of their numbers."""

    def __init__(self, folder: Path, described: native.Export, card: str, keep: int = 4) -> None:
        self._folder, self._card, self._keep = folder, card, VersionsSettings(keep).keep
        self._described = successor(described)

    @property
    def current(self) -> Path:
        """The link to the version that is served."""
        return self._folder / "current"

    def publish(self, drafter: Any, version: int, provenance: dict[str, Any]) -> Path:
        """Write the drafter as this version, unless it is there already, and make it the current one.

        A version is a function of what was learnt, so that one which is there already is this one.
        """
        folder = self._folder / "versions" / f"{version:06d}"
        if not folder.exists():
            told = self._described.provenance | {"adaptation": {"version": version, **provenance}}
            note = f"Adapted by train/adapt.py: version {version} of a session, from {self._described.name!r}."
            card = with_note(self._card, note) if version else self._card
            native.save(drafter, replace(self._described, provenance=told), drafter.vocab, folder, card)
        self._point(folder)
        self._prune()
        return folder

    def _point(self, folder: Path) -> None:
        temporary = self._folder / f".current.{os.getpid()}.tmp"
        with explain_disk_errors(temporary):
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(os.path.relpath(folder, self._folder))
            os.replace(temporary, self.current)

    def _prune(self) -> None:
        """Delete old versions and deltas, but neither the first nor the current one."""
        for kind in ("versions", "deltas"):
            found = sorted(path for path in (self._folder / kind).glob("*") if _NAME.fullmatch(path.name))
            for path in found[1 : -self._keep]:
                if path.name != self.current.resolve().name:
                    shutil.rmtree(path)


class Swap:
    """An observer that puts offered weights into the drafter that serves, between two rounds and never else.

    `offer` may be called from any thread and at any time. Keys and states that the drafter cached under its old weights
    stay: its drafts are then a little worse for a while, and the output's law is the target's whatever they are.
    """

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self._lock = Lock()
        self._offered: Weights | None = None

    def offer(self, weights: Weights) -> None:
        """Serve these weights from the next round on."""
        with self._lock:
            self._offered = weights

    def before_round(self) -> None:
        """Take what was offered last."""
        with self._lock:
            weights, self._offered = self._offered, None
        if weights is not None:
            self.drafter.load_state_dict(weights)

    def checked(self, made: Checked) -> None:
        """Nothing: a draft was checked by the weights that drew it."""


class Observers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def before_round(self) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.before_round()

    def checked(self, made: Checked) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.checked(made)
