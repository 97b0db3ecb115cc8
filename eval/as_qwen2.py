"""The bundled target under Qwen2's names: the same function, with biases of queries, keys and values that are zeros.

    python eval/as_qwen2.py outputs/parity/qwen2

MiMo's is the only multi-token prediction module that vLLM runs beside a dense target without a code of its own, and
MiMo is of Qwen2's shape.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import Qwen2Config, Qwen2ForCausalLM

from models.files import atomic_folder
from models.target import load_target

_KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip


def write_as_qwen2(folder: Path) -> None:
    """Write the target as a Hugging Face folder with the tokenizer."""
    target = load_target("tiny", device="cpu")
    model = Qwen2ForCausalLM(Qwen2Config(**{key: getattr(target.config, key) for key in _KEPT}))
    biases = {name: tensor.zero_() for name, tensor in model.state_dict().items() if name.endswith("_proj.bias")}
    model.load_state_dict({**target.model.state_dict(), **biases})
    assert target.tokenizer is not None
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        target.tokenizer.save_pretrained(temporary)
        if target.model.generation_config is not None:
            target.model.generation_config.save_pretrained(temporary)


if __name__ == "__main__":
    write_as_qwen2(Path(sys.argv[1]))
