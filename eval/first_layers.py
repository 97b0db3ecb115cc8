"""A draft model to time engines with: the first layers of a target, as they are, with its embedding, norm and head.

    python eval/first_layers.py smollm2 6 outputs/bench/first-layers

It accepts little, for nobody trained it to leave the other layers out. What is compared is how fast two engines are
with the same draft model.
"""

from __future__ import annotations

import sys
from pathlib import Path

from models.errors import UserError
from models.files import atomic_folder
from models.target import load_target


def write_first_layers(source: str, num_layers: int, folder: Path) -> None:
    """Write the target's first `num_layers` layers as a Hugging Face folder with the tokenizer."""
    target = load_target(source, device="cpu")
    model, decoder = target.model, target.model.get_decoder()
    if not 0 < num_layers < target.num_layers:
        raise UserError(f"{num_layers} layers are asked for: the target has {target.num_layers}.")
    decoder.layers = decoder.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    assert target.tokenizer is not None
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        target.tokenizer.save_pretrained(temporary)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    try:
        source, num_layers, folder = arguments
        write_first_layers(source, int(num_layers), Path(folder))
    except ValueError:
        print("error: give a target (tiny or smollm2), a number of layers and a folder", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
