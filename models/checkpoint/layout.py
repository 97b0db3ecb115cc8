"""What the formats of other engines share: folders whose tensors a manifest foretells, checked on the file.

config.json          what the engine reads
model.safetensors    the tensors, under the engine's names
draftsmith.json      what we know of both, and no engine reads: target, drafter, provenance, config.json as it was
                     written, and the sha256 of the tensors; a checkpoint that was made elsewhere has none
README.md            the model card
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.checkpoint import native
from models.errors import UserError
from models.files import atomic_folder, flat, sha256
from models.target import Target

CONFIG, TENSORS, RECORD = "config.json", "model.safetensors", "draftsmith.json"
Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder must hold: every tensor's shape, and the keys of config.json that an engine reads.

    Tensors have the floating dtype that config.json names, but for those in `dtypes`; those in `wider` may be float64
    as well. `optional` ones may be left out of a checkpoint that was made elsewhere.
    """

    shapes: Shapes
    keys: tuple[str, ...]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    wider: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Contents:
    """What was read from a folder; `export` is what its record says of it, if it has one."""

    folder: Path
    config: Config
    tensors: dict[str, Tensor]
    export: native.Export | None


# What a config.json and the names that there are foretell: the names only choose between two spellings of one thing.
Foretell = Callable[[Config, set[str]], Manifest]
Mine = Callable[[Config, str], bool]  # whether a tensor of that name is the drafter's


def require(name: str, drafter: Any, kinds: tuple[type, ...], obstacles: Callable[[], Mapping[str, bool]]) -> None:
    """Raise UserError where `drafter` is none of the `kinds` that format `name` takes, or an obstacle is there.

    Obstacles are asked for of a drafter of such a kind only.
    """
    refuse_kind(name, type(drafter), kinds)
    taken = " or ".join(kind.__name__ for kind in kinds)
    if found := [what for what, there in obstacles().items() if there]:
        raise UserError(f"Format {name} cannot hold this {taken}: {'; '.join(found)}.")


def refuse_kind(name: str, kind: type, kinds: tuple[type, ...]) -> None:
    """Raise UserError where drafters of `kind` are none of the `kinds` that format `name` takes."""
    if kind not in kinds:
        raise UserError(f"Format {name} takes {' or '.join(k.__name__ for k in kinds)}, not {kind.__name__}.")


def refuse_other_folder(folder: Path) -> None:
    """Raise UserError for a folder that holds something else than what we wrote in another engine's format."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).exists():
        raise UserError(f"{str(folder)!r} holds something else: name a folder that is not there yet.")


def obstacles_of_target(target: Target, *, embedding: bool = True, head: bool = True) -> dict[str, bool]:
    """What an engine would not do as we do when it reads the target's embedding or head for the drafter."""
    found = {"the target's embedding is more than a table of vectors": type(target.embedding) is not nn.Embedding}
    heads = {
        "the target's head has a bias": target.head.linear.bias is not None,
        "the target's logits are capped": target.head.softcap is not None,
    }
    return {**(found if embedding else {}), **(heads if head else {})}


def write(
    folder: Path,
    name: str,
    drafter: Any,
    export: native.Export,
    *,
    tensors: Mapping[str, Tensor],
    config: Config,
    foretell: Foretell,
    card: str,
    more_record: Config | None = None,
    file: str = TENSORS,
    mine: Mine = lambda config, name: True,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write a folder of format `name`, whole or not at all, and only if what is on disk is what `foretell` says.

    draftsmith.json gets native's description of the drafter, and `more_record`; `also` writes further files, of which
    those named above are then replaced. Raises UserError that names every tensor and key that is missing, unread or of
    another shape or dtype.
    """
    refuse_other_folder(folder)
    with atomic_folder(folder) as temporary:
        plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        if also is not None:
            also(temporary)
        save_file(plain, temporary / file, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        (temporary / "README.md").write_text(card)
        kept = {
            **native.config_of(drafter, export, drafter.vocab),
            "target": export.target,  # an adapted one lies elsewhere, where it was found
            "layout": name,
            **(more_record or {}),
            "config": config,
            "tensors": sorted(plain),
            "file": file,
            "sha256": sha256(temporary / file),
        }
        (temporary / RECORD).write_text(json.dumps(kept, indent=2) + "\n")
        found = read(temporary, foretell, mine=mine)
        different = [key for key, tensor in plain.items() if not torch.equal(found.tensors[key], tensor)]
        if different:
            raise UserError(f"{str(folder)!r} was written with other values in {', '.join(different)}.")


def read(folder: Path, foretell: Foretell, *, mine: Mine = lambda config, name: True) -> Contents:
    """Read a folder whose tensors are those that `foretell` says of its config.json.

    Tensors whose names are not `mine` are somebody else's. Raises UserError that names all that is missing, unread, or
    of another shape or dtype, and what was altered since the folder was written.
    """
    config, record = read_json(folder / CONFIG, folder), _record(folder)
    if record is not None:
        refuse_changes(folder / CONFIG, record["config"], config)
    tensors = read_tensors(folder, lambda name: mine(config, name))
    manifest = _foretold(foretell, config, set(tensors), folder)
    problems = [f"config.json lacks {key}" for key in manifest.keys if record is not None and key not in config]
    known = set() if record is None else set(record["tensors"])
    problems += _problems(tensors, manifest, known, None if record is None else _dtype(config))
    if problems:
        raise UserError(f"{str(folder)!r} does not fit its format: {'; '.join(problems)}.")
    if record is None:
        return Contents(folder, config, tensors, None)
    file = folder / record["file"]
    if sha256(file) != record["sha256"]:
        raise UserError(f"{str(file)!r} was altered after the export: it has another sha256.")
    return Contents(folder, config, tensors, native.export_of(record))


def _foretold(foretell: Foretell, config: Config, names: set[str], folder: Path) -> Manifest:
    """The manifest of a config. Raises UserError where the config lacks what it takes, or says something senseless."""
    try:
        return foretell(config, names)
    except KeyError as error:
        raise UserError(f"{str(folder / CONFIG)!r} lacks {error.args[0]}.") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{str(folder / CONFIG)!r} is senseless: {error}.") from error


def _problems(
    tensors: Mapping[str, Tensor], manifest: Manifest, known: set[str], dtype: torch.dtype | None
) -> list[str]:
    """What is wrong with tensors of which `known` were there once; `dtype` is the exact one of floating ones."""
    wanted = manifest.shapes
    required = (wanted.keys() - manifest.optional) | known
    found = [f"missing {name}" for name in sorted(required - tensors.keys())]
    found += [f"unread {name}" for name in sorted(tensors.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & tensors.keys()):
        tensor, exact = tensors[name], manifest.dtypes.get(name, dtype)
        if exact is not None and name in manifest.wider and tensor.dtype == torch.float64:
            exact = torch.float64
        if tuple(tensor.shape) != wanted[name]:
            found.append(f"{name} is {tuple(tensor.shape)}, not {wanted[name]}")
        if (exact is None and not tensor.is_floating_point()) or (exact is not None and tensor.dtype != exact):
            found.append(f"{name} holds {tensor.dtype}, not {exact or 'floating-point numbers'}")
    return found


def _dtype(config: Config) -> torch.dtype | None:
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else None


def dtype_keys(dtype: torch.dtype) -> Config:
    """The dtype of the tensors, under the names of new and of older readers."""
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def _record(folder: Path) -> Config | None:
    if not (folder / RECORD).exists():
        return None
    record = native.read_config(folder / RECORD)
    for key, kind in (("layout", str), ("config", dict), ("tensors", list), ("file", str)):
        if not isinstance(record.get(key), kind):
            raise UserError(f"{str(folder / RECORD)!r} is damaged: {key} is {record.get(key)!r}.")
    return record


def recorded_format(folder: Path) -> str | None:
    """The format that a folder of ours was written in; None for one that was made elsewhere."""
    record = _record(folder)
    return None if record is None else record["layout"]


def refuse_changes(path: Path, before: Config, now: Config) -> None:
    """Raise UserError that names every key of the JSON file at `path` that is another than when it was written."""
    old, new = dict(flat(before)), dict(flat(now))
    changed = [
        f"{key} is {new.get(key, 'missing')!r}, and was {old.get(key, 'missing')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) or (key in old) != (key in new)
    ]
    if changed:
        raise UserError(f"{str(path)!r} was altered after the export: {'; '.join(changed)}.")


def read_json(path: Path, folder: Path) -> Config:
    """A JSON object on disk. Raises UserError where it is missing or damaged."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{str(folder)!r} is not an export: {error.strerror or error} ({path.name}).") from error
    except ValueError as error:
        raise UserError(f"{str(path)!r} is damaged: {error}.") from error
    if not isinstance(found, dict):
        raise UserError(f"{str(path)!r} is damaged: it holds no JSON object.")
    return found


def read_tensors(folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """The `wanted` tensors of a folder, of one file or several; no others are read into memory.

    Raises UserError where files are missing, damaged or pickled.
    """
    return {name: tensor for file in _files(folder) for name, tensor in native.read_tensors(file, wanted).items()}


def tensor_names(folder: Path) -> set[str]:
    """The names of all tensors, without reading them."""
    return {name for file in _files(folder) for name in native.tensor_names(file)}


def _files(folder: Path) -> list[Path]:
    index = folder / f"{TENSORS}.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(read_json(index, folder).get("weight_map", {}).values()))]
    named = [folder / name for name in (TENSORS, "medusa_lm_head.safetensors") if (folder / name).exists()]
    pickled = [name for name in _PICKLED if (folder / name).exists()]
    if not named and pickled:
        raise UserError(
            f"{str(folder)!r} has its weights in {pickled[0]}, which is pickled and so never read here: convert it to "
            f"{TENSORS} with safetensors.torch.save_file(torch.load(FILE, weights_only=True), {TENSORS!r})."
        )
    return named[:1] or [folder / TENSORS]


def refuse_values(contents: Contents, wanted: Mapping[str, Any], config: Config | None = None) -> None:
    """Raise UserError where config.json, or a part of it, says another value than `wanted`; a key it lacks is none."""
    config = contents.config if config is None else config
    wrong = [
        f"{key} is {config[key]!r}, and only {value!r} is supported"
        for key, value in wanted.items()
        if config.get(key, value) != value
    ]
    if wrong:
        raise UserError(f"{str(contents.folder / CONFIG)!r}: {'; '.join(wrong)}.")


def refuse_other_sizes(contents: Contents, target: Target, **sizes: tuple[int, int]) -> None:
    """Raise UserError for another target than the record names, or where sizes differ: name=(of the file, of it)."""
    if contents.export is not None:
        native.refuse_other_target(contents.export, target, contents.folder)
    wrong = [
        f"{name} is {theirs}, and the target's is {ours}" for name, (theirs, ours) in sizes.items() if theirs != ours
    ]
    if wrong:
        raise UserError(f"{str(contents.folder)!r} is not for {target.name!r}: {'; '.join(wrong)}.")


def refuse_own_copy(contents: Contents, name: str, own: Tensor, what: str) -> None:
    """Raise UserError where tensor `name` is there, and is not the target's `what` as far as its dtype tells."""
    found = contents.tensors.get(name)
    if found is None:
        return
    coarse = max(torch.finfo(dtype).eps for dtype in (found.dtype, own.dtype))
    if not torch.allclose(found.float(), own.detach().cpu().float(), rtol=2 * coarse, atol=1e-6):
        raise UserError(
            f"{str(contents.folder)!r} brings {name}, which is not the target's {what}; our drafter reads the target's."
        )


def described(contents: Contents, model: Config, num_speculative_tokens: int) -> native.Export:
    """What a folder says of itself; of one that was made elsewhere, without a target and provenance."""
    if contents.export is not None:
        return contents.export
    target = {"name": "", "fingerprint": "", "load": {}}
    return native.Export(contents.folder.name, model, target, num_speculative_tokens, {})


def fill(drafter: Any, contents: Contents, tensors: dict[str, Tensor]) -> Any:
    """Load tensors under the drafter's own names; returns it, ready to draft."""
    native.fill(drafter, tensors, contents.folder)
    return drafter.eval()
