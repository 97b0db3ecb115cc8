"""What the result of a parity case depends on, as a short hash: a case that passed is not run again while it stays.

That is the options, every file of the export and of the prompts, the target's files by size and time, the libraries of
both engines, and this code: by its revision, or outside a git checkout by its version and its sources.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from eval import provenance
from models.checkpoint import detect, target_options
from models.files import sha256
from models.target.load import place_of

_ROOMS = ("conf", "data", "engine", "eval", "models")
_LIBRARIES = ("vllm*", "torch", "transformers")


def key_of(case: dict[str, Any], options: dict[str, Any]) -> str | None:
    """The hash for a case's settings, the rest of which are `options`; None where this code may be anything.

    Raises UserError for an export that cannot be read, or does not say which target it is for.
    """
    known = provenance.provenance()
    code = known["git_revision"] or f"{known['versions']['draftsmith']} {_sources()}"
    if "dirty" in code:
        return None
    own = (*case, "cases", "output", "debug")
    folders = [Path(case[name]) for name in ("export", "files") if case[name] is not None]
    files = [file for folder in folders for file in _all_files(folder)]
    files += [file for file in (Path(options["prompts"]),) if file.is_file()]
    told = {
        "case": case,
        "options": {name: value for name, value in options.items() if name not in own},
        "files": {str(file): sha256(file) for file in files},
        "target": _target(case, options["target"]),
        "libraries": known["versions"] | (_libraries_of(options["vllm"]["python"]) if case["engine"] == "vllm" else {}),
        "code": code,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _target(case: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """How the target is loaded, and what tells its files from others without reading them."""
    folder = Path(case["export"])
    load = target_options(detect(folder, case["source_format"], "source_format").read(folder), given, folder)
    found = {str(key): value for key, value in load.items()}
    for place in (place_of(load["source"], load.get("name_or_path")), load.get("adapter")):
        if place is not None:
            local = _local(place, load.get("revision"))
            found[f"files of {place}"] = [
                [str(file.relative_to(local)), file.stat().st_size, file.stat().st_mtime_ns]
                for file in _all_files(local)
            ]
    return found


def _local(place: str, revision: str | None) -> Path:
    """The folder of a target that may be named as the hub does; its cached folder bears the commit's name."""
    cached = None if Path(place).is_dir() else try_to_load_from_cache(place, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else Path(place)


def _libraries_of(python: str) -> dict[str, Any]:
    """The versions in the environment of another interpreter, told by the folders that installing leaves there."""
    packages = Path(python).expanduser().absolute().parent.parent / "lib"
    found = [path.name for name in _LIBRARIES for path in packages.glob(f"python3*/site-packages/{name}-*.dist-info")]
    return {"of vLLM's environment": sorted(found)}


def _sources() -> str:
    """Hash of this project's code."""
    files = [file for room in _ROOMS for file in _all_files(provenance.ROOT / room) if file.suffix in (".py", ".yaml")]
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()[:16]


def _all_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
