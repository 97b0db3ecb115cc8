"""Train the bundled `tiny` target: a Llama-shaped model of 2.5 million parameters, and its tokenizer.

    python train/pretrain_tiny.py --output models/target/tiny

It learns the standard library's source and language documentation (`data/stdlib.py`, split "train"), in about 45
minutes on two CPU cores, and prints the loss on the split "validation" as it goes. The result depends on the Python
version (it is the corpus), the torch version and the number of threads; the bundled weights were made with the
defaults below under Python 3.11. The weights are stored as float16 (under 5 MB) and used as float32.

Matrices inside the layers are trained by Muon, the tied embedding and the norms by AdamW, both with a linear warm-up
and a linear decay to zero. The last part of the training reads sequences of twice the length, so that positions up
to `max_position_embeddings` are known.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data.stdlib import documents

END_OF_TEXT, PADDING = "<|endoftext|>", "<|padding|>"
# Words with their leading space, numbers of up to three digits, runs of punctuation, and runs of white space that
# leave the last space to the following word: indentation becomes one token.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE of `vocab_size` tokens, the two special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING)


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Concatenate the documents, each ended by the end-of-text token: (tokens,) int64."""
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return torch.tensor([token for row in rows for token in (*row, tokenizer.eos_token_id)])


def batch_at(stream: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Cut sequences of `length` tokens out of the stream at `offsets`: (B, length)."""
    return stream[offsets[:, None] + torch.arange(length)]


@torch.no_grad()
def validation_loss(model: torch.nn.Module, stream: Tensor, length: int = 512, rows: int = 64) -> float:
    """Mean cross-entropy in nats per token over `rows` evenly spaced sequences."""
    offsets = torch.linspace(0, len(stream) - length - 1, rows).long()
    losses = [model(input_ids=ids, labels=ids).loss for ids in batch_at(stream, offsets, length).split(8)]
    return torch.stack(losses).mean().item()


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by five Newton-Schulz steps (Jordan et al. 2024).

    `torch.optim.Muon` does the same in bfloat16, which processors without that hardware multiply a hundred times
    slower; here it is float32, and matrices of one shape are orthogonalised together.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix from its gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for (rows, columns), parameters in by_shape.items():
                velocity = [self.state[p].setdefault("velocity", torch.zeros_like(p)) for p in parameters]
                for v, p in zip(velocity, parameters, strict=True):
                    v.mul_(group["momentum"]).add_(p.grad)
                nesterov = [p.grad + group["momentum"] * v for v, p in zip(velocity, parameters, strict=True)]
                updates = orthogonalise(torch.stack(nesterov)) * max(1.0, rows / columns) ** 0.5
                for p, update in zip(parameters, updates, strict=True):
                    p.add_(update, alpha=-group["lr"])


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of each matrix (M, rows, columns) towards 1."""
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    wide = x.mT if x.shape[1] > x.shape[2] else x
    for _ in range(5):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.mT if x.shape[1] > x.shape[2] else wide


def optimizers(model: LlamaForCausalLM, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    inside = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    chosen = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(inside, lr=muon_lr),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write model (float16), tokenizer and generation defaults to `output`; the model in memory stays float32."""
    half = LlamaForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.half()
    half.config.dtype = "float16"
    half.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    half.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("models/target/tiny"))
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument(
        "--length", type=int, default=512, help="tokens per sequence; doubled in the last 15%% of steps"
    )
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    texts = [d.text for d in documents("train")]
    tokenizer = train_tokenizer(texts, vocab_size=2048)
    stream = token_stream(tokenizer, texts)
    held_out = token_stream(tokenizer, [d.text for d in documents("validation")])
    config = LlamaConfig(
        vocab_size=2048, hidden_size=192, intermediate_size=432, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2 * args.length, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    print(f"{model.num_parameters():,} parameters, {len(stream):,} training tokens, {len(held_out):,} held out")
    compiled = torch.compile(model)
    chosen = optimizers(model, args.muon_lr, args.adam_lr)
    base_lrs = [optimizer.param_groups[0]["lr"] for optimizer in chosen]
    long_from = int(args.steps * 0.85)
    started = time.monotonic()
    for step in range(args.steps):
        scale = min(1.0, (step + 1) / 50, (args.steps - step) / (0.6 * args.steps))
        for optimizer, lr in zip(chosen, base_lrs, strict=True):
            optimizer.param_groups[0]["lr"] = lr * scale
        length = args.length if step < long_from else 2 * args.length
        offsets = torch.randint(len(stream) - length, (args.batch_tokens // length,))
        ids = batch_at(stream, offsets, length)
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            rate = (step + 1) * args.batch_tokens / (time.monotonic() - started)
            print(
                f"step {step + 1}/{args.steps}  loss {loss.item():.3f}  validation "
                f"{validation_loss(model, held_out):.3f}  {rate:.0f} tokens/s", flush=True
            )  # fmt: skip
            save(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
