"""Write an export again with int8 weights, and measure both, so that what that costs is known.

    python train/quantize.py export=outputs/.../export
    python train/quantize.py export=outputs/.../export prompts=stdlib temperatures=[0]

Takes every setting of `eval/acceptance.py`. The new export is `<export>-int8`, or `into`; its card says what it was
measured at.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from conf.compose import main, plain
from models.errors import UserError


def job(config: DictConfig) -> None:
    """Write the int8 export, and measure it beside the one that it was made from."""
    options = plain(config)
    if not isinstance(options["export"], str):
        raise UserError(f"export is {options['export']!r}: name one folder.")
    source = Path(options["export"])
    from eval.acceptance import measure_exports  # heavy imports wait until the command line is known to be right
    from models.checkpoint import native
    from models.files import write_text
    from train.model_card import model_card

    folder = Path(options.pop("into") or source.with_name(f"{source.name}-int8"))
    native.save_int8(source, folder)
    write_text(folder / "README.md", model_card(native.read(folder), []))  # not the other's figures
    sizes = [(place / "model.safetensors").stat().st_size / 1e6 for place in (source, folder)]
    print(f"{str(folder)!r} holds {sizes[1]:.1f} MB, {str(source)!r} {sizes[0]:.1f} MB")
    measured = measure_exports({**options, "export": [str(source), str(folder)]})
    own = measured[len(measured) // 2 :]  # export by export
    write_text(folder / "README.md", model_card(native.read(folder), own))


if __name__ == "__main__":
    main("quantize", job)
