"""How engines are told to use a folder: Markdown in which TARGET, FOLDER, TOKENS and ROWS, one more, are filled in."""

from __future__ import annotations

# vLLM 0.32 keeps "eagle" and "eagle3" as they are named, and overrides other methods by words in the path.
_GUESSES = """, which takes another method than the one named here where the folder's path has "eagle-", "eagle3",
"dflash" or "dspark" in it: keep such words out of it"""
_PATHS = {"medusa": _GUESSES, "draft_model": _GUESSES}
_UNRUN = "written from its code; this project's tests do not run it"
PARTS = ("TARGET", "FOLDER", "TOKENS", "ROWS")


def vllm(method: str) -> str:
    """For vLLM, with the method by its name."""
    return f"""vLLM{_PATHS.get(method, "")}:

```python
from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts further processes, which import this
    drafts = {{"method": "{method}", "model": "FOLDER", "num_speculative_tokens": TOKENS}}
    llm = LLM(model="TARGET", speculative_config=drafts)
    print(llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text)
```
"""


def sglang(algorithm: str) -> str:
    """For SGLang's server."""
    return f"""SGLang ({_UNRUN}):

    python -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} \\
        --speculative-draft-model-path FOLDER --speculative-num-steps TOKENS --speculative-eagle-topk 1 \\
        --speculative-num-draft-tokens ROWS
"""


def safeailab(more: str) -> str:
    """For SafeAILab's code, which unpickles its weights."""
    return f"""SafeAILab's code reads a pickled file, which you make of this one ({_UNRUN}):

```python
import torch
from eagle.model.ea_model import EaModel
from safetensors.torch import load_file

torch.save(load_file("FOLDER/model.safetensors"), "FOLDER/pytorch_model.bin")
model = EaModel.from_pretrained(base_model_path="TARGET", ea_model_path="FOLDER"{more})
```
"""


def inside_the_target(engine: str) -> str:
    """For a module that is a part of the target's checkpoint."""
    return f"""These are tensors of the target's own checkpoint. `stitch=true` in the command that wrote
them, python train/export.py, writes the target's files with them. {engine}
"""


VLLM_MTP = f"""vLLM then starts both from the folder{_GUESSES}:

```python
from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM starts further processes, which import this
    drafts = {{"method": "mtp", "num_speculative_tokens": TOKENS}}
    llm = LLM(model="FOLDER", speculative_config=drafts)
    print(llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=64))[0].outputs[0].text)
```
"""


TRANSFORMERS = """transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("TARGET")
target = AutoModelForCausalLM.from_pretrained("TARGET")
drafter = AutoModelForCausalLM.from_pretrained("FOLDER")
inputs = tokenizer("def main(", return_tensors="pt")
print(tokenizer.decode(target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=64)[0]))
```
"""

FASTERDECODING = f"""FasterDecoding's code reads a pickled file, which you make of this one ({_UNRUN}):

```python
import torch
from safetensors.torch import load_file

torch.save(load_file("FOLDER/model.safetensors"), "FOLDER/medusa_lm_head.pt")
```
"""

SPECULATORS = """vLLM also starts target and drafter from the folder alone:

```python
from vllm import LLM

if __name__ == "__main__":
    llm = LLM(model="FOLDER")
```
"""
