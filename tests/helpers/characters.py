"""A tokenizer of single characters, the first of which make JSON: texts that random targets write can then be read."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from models.target import Target

CHARACTERS = '{"a:},[] \n' + "bcdefghijklmnopqrstuvwxyz" + "0123456789" + "ABCDEFGHIJ" + "()_-+=./'"


def character_tokenizer(vocab_size: int, pairs: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """One token for each of the first `CHARACTERS`, then one for each of `pairs`: `vocab_size` in all."""
    tokens = [*CHARACTERS[: vocab_size - len(pairs)], *pairs]
    assert len(set(tokens)) == vocab_size
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [(pair[0], pair[1:]) for pair in pairs])
    inner = Tokenizer(model)
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


def with_characters(target: Target) -> Target:
    """The same target, with such a tokenizer."""
    return Target(target.model, character_tokenizer(target.vocab_size), target.name)
