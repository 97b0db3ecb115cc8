"""DFlash and DSpark: blocks against loops over single rows, what they read, the Markov correction and confidences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.drafter.dflash import DFlashDrafter, published_layers
from models.errors import UserError
from models.sampling import RequestRandom, SamplingParams
from models.target import Target
from models.types import TargetFeatures
from models.vocab import DraftVocab
from tests.helpers.drafters import EXACT, build_shaken, prompts, tiny_target

CLASS = "models.drafter.dflash.DFlashDrafter"
MODELS: dict[str, dict[str, Any]] = {
    "dflash": {"_target_": CLASS, "block_size": 4, "num_layers": 2},
    "dspark": {
        "_target_": CLASS, "block_size": 3, "num_layers": 2, "predict_at_anchor": True, "markov_rank": 5,
        "confidence": True, "num_key_value_heads": 4, "head_dim": 8, "mask_token_id": 7, "capture_layers": [1, -1],
    },
}  # fmt: skip
REDUCED = torch.arange(0, 20, 2)


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
    return tiny_target(torch.float64, sharpness=2.0, **sizes)


@pytest.fixture(params=MODELS)
def drafter(request: pytest.FixtureRequest, target: Target) -> DFlashDrafter:
    made: DFlashDrafter = build_shaken(MODELS[request.param], target, DraftVocab(20, REDUCED))
    return made


def features_of(target: Target, drafter: Any, length: int = 7, batch_size: int = 2) -> TargetFeatures:
    """Texts of the target's states; those of padding are noise."""
    ids = torch.tensor(prompts([length + 1] * batch_size, 20, seed=2))
    with torch.no_grad():
        hidden = target(ids[:, :-1], capture_layers=drafter.capture_layers).hidden
    assert hidden is not None
    return TargetFeatures(ids[:, :-1], ids[:, 1:], hidden.clone().requires_grad_(), torch.tensor([length] * batch_size))


def told_by_loop(drafter: DFlashDrafter, target: Target, features: TargetFeatures, text: int, row: int) -> Tensor:
    """What the block behind one row tells (N, D + r), row by row and head by head."""
    config, assigned = drafter.config, dict(drafter.named_parameters())
    heads, key_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert features.hidden is not None and key_heads is not None and size is not None

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * assigned[f"{name}.weight"]

    def turned(x: Tensor, position: int) -> Tensor:
        theta, half = config.rope_parameters["rope_theta"], size // 2
        angle = torch.tensor([position * theta ** (-i / half) for i in range(half)], dtype=torch.float32).double()
        cos, sin, first, second = angle.cos(), angle.sin(), x[:half], x[half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin])

    anchor = int(features.next_token_ids[text, row])
    ids = [anchor] + [drafter.mask_token_id] * (drafter.block_size - 1)
    embedding: Any = target.embedding
    block = [embedding.weight[token] for token in ids]
    context = [norm(assigned["fc.weight"] @ state, "hidden_norm") for state in features.hidden[text, : row + 1]]
    for index in range(config.num_hidden_layers):
        name = f"stack.layers.{index}"
        attention = f"{name}.self_attn"
        normed = [norm(x, f"{name}.input_layernorm") for x in block]
        read = context + normed  # row i stands at position i
        out = []
        for j, x in enumerate(normed):
            parts = []
            for head in range(heads):
                mine = slice(head * size, (head + 1) * size)
                group = head // (heads // key_heads)
                theirs = slice(group * size, (group + 1) * size)
                q = turned(norm(assigned[f"{attention}.q_proj.weight"][mine] @ x, f"{attention}.q_norm"), row + 1 + j)
                scores, values = [], []
                for position, other in enumerate(read):
                    k = norm(assigned[f"{attention}.k_proj.weight"][theirs] @ other, f"{attention}.k_norm")
                    scores.append(q @ turned(k, position) / size**0.5)
                    values.append(assigned[f"{attention}.v_proj.weight"][theirs] @ other)
                parts.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            out.append(block[j] + assigned[f"{attention}.o_proj.weight"] @ torch.cat(parts))
        block = []
        for x in out:
            normed_x = norm(x, f"{name}.post_attention_layernorm")
            gate = assigned[f"{name}.mlp.gate_proj.weight"] @ normed_x
            up = assigned[f"{name}.mlp.up_proj.weight"] @ normed_x
            block.append(x + assigned[f"{name}.mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up))
    told = [norm(x, "norm") for x in block][0 if drafter.predict_at_anchor else 1 :]
    if drafter.markov_head is None:
        return torch.stack(told)
    following = features.next_token_ids[text].tolist()
    before = [following[min(row + j, len(following) - 1)] for j in range(len(told))]
    first = assigned["markov_head.markov_w1.weight"]
    return torch.stack([torch.cat([x, first[token]]) for x, token in zip(told, before, strict=True)])


LOOSE = {"atol": 1e-6, "rtol": 1e-6}  # RoPE's angles are float32 on both sides


def test_blocks_are_those_of_loops(target: Target, drafter: DFlashDrafter) -> None:
    features = features_of(target, drafter)
    rows = torch.tensor([[0, 3, 6], [5, 1, 2]])
    found = drafter.told_behind(features, rows)
    assert found.shape == (2, 3, drafter.max_depth, 16 + drafter.markov_rank)
    expected = torch.stack([
        torch.stack([told_by_loop(drafter, target, features, text, int(row)) for row in rows[text]])
        for text in range(2)
    ])  # fmt: skip
    torch.testing.assert_close(found, expected, **LOOSE)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    named = {n: p for n, p in drafter.named_parameters() if "confidence" not in n and "w2" not in n}
    assert features.hidden is not None
    leaves = [features.hidden, *named.values()]
    ours, theirs = (torch.autograd.grad((made * upstream).sum(), leaves) for made in (found, expected))
    for name, a, b in zip(["hidden", *named], ours, theirs, strict=True):
        assert b.abs().max() > 1e-4, name
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_unroll_is_the_block_behind_every_row(target: Target, drafter: DFlashDrafter) -> None:
    """And reads the states of rows up to its own, no other, and of the tokens the one behind it."""
    features = features_of(target, drafter, batch_size=1)
    steps = list(drafter.unroll(features, drafter.max_depth))
    for step, hidden in enumerate(steps):
        for row in range(7):
            torch.testing.assert_close(
                hidden[0, row], drafter.told_behind(features, torch.tensor([[row]]))[0, 0, step], **EXACT
            )
            assert features.hidden is not None
            (grad,) = torch.autograd.grad(hidden[0, row, :16].sum(), features.hidden, retain_graph=True)
            assert torch.equal(grad[0].abs().amax(-1) > 1e-12, torch.arange(7) <= row)
    with pytest.raises(UserError, match=f"{drafter.max_depth + 1} steps are asked of blocks"):
        next(drafter.unroll(features, drafter.max_depth + 1))


def test_the_correction_is_a_product_of_two_matrices(target: Target) -> None:
    drafter: DFlashDrafter = build_shaken(MODELS["dspark"], target, DraftVocab(20, REDUCED))
    assert drafter.markov_head is not None
    features = features_of(target, drafter)
    first, second = drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight
    for step, told in enumerate(drafter.unroll(features, 3)):
        for row in range(4):  # the token before x_{t+2+s} is x_{t+1+s}
            before = int(features.next_token_ids[0, row + step])
            expected = target.head.weight[REDUCED] @ told[0, row, :16] + second @ first[before]
            torch.testing.assert_close(drafter.logits(told[0, row], step), expected, **EXACT)


def test_at_first_nothing_is_corrected_and_no_temperature_set(target: Target) -> None:
    drafter: DFlashDrafter = DFlashDrafter(target, DraftVocab(20), markov_rank=3, confidence=True)
    assert drafter.markov_head is not None and drafter.confidence_head is not None
    assert (drafter.markov_head.markov_w2.weight == 0).all() and (drafter.markov_head.markov_w1.weight != 0).all()
    assert drafter.confidence_head.temperatures.tolist() == [1.0] * 7


def test_confidences_are_of_the_token_drawn_next(target: Target) -> None:
    """Behind a chain and behind several nodes at once: those of training's rows, over the position's temperature."""
    drafter: DFlashDrafter = build_shaken(MODELS["dspark"], target, DraftVocab(20))
    head = drafter.confidence_head
    assert head is not None
    head.temperatures.copy_(torch.tensor([0.5, 2.0, 3.0]))
    features = features_of(target, drafter, length=5, batch_size=1)
    with torch.no_grad():
        expander: Any = drafter.expander(drafter.new_state(1, 16), features)
        expander.root()
        found = [expander.confidence()]
        expander.below(torch.tensor([[3, 8]]), torch.tensor([[0, 0]]))
        found.append(expander.confidence())
        for token, place in ((3, 0), (8, 1)):
            ids = torch.cat([features.next_token_ids, torch.tensor([[token]])], dim=1)
            assert features.hidden is not None
            more = torch.cat([features.hidden, torch.randn_like(features.hidden[:, :1])], dim=1)
            longer = TargetFeatures(torch.cat([features.token_ids, ids[:, 4:5]], dim=1), ids, more, torch.tensor([6]))
            steps = list(drafter.unroll(longer, 2))
            first, second = (head.proj(step[0, 4])[0] for step in steps)
            torch.testing.assert_close(found[0][0, 0], (first / 0.5).sigmoid(), **EXACT)
            torch.testing.assert_close(found[1][0, place], (second / 2.0).sigmoid(), **EXACT)


def test_a_draft_takes_one_pass_whatever_its_length(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter: DFlashDrafter = build_shaken(MODELS["dspark"], target, DraftVocab(20))
    calls: list[int] = []
    blocks, head = drafter.stack.blocks, drafter.head.linear.forward

    def counted(which: int, forward: Any) -> Any:
        def call(*given: Any) -> Any:
            calls.append(which)
            return forward(*given)

        return call

    monkeypatch.setattr(drafter.stack, "blocks", counted(0, blocks))
    monkeypatch.setattr(drafter.head.linear, "forward", counted(1, head))
    features = features_of(target, drafter, batch_size=1)
    drafter.propose(
        drafter.new_state(1, 16), features, num_speculative_tokens=3, sampling=SamplingParams(1.0),
        random=RequestRandom([0], 4),
    )  # fmt: skip
    assert calls == [0, 1]


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (36, (2, 10, 18, 26, 34)),
        (30, (2, 9, 15, 21, 28)),
        (8, (2, 3, 4, 5, 6)),
        (6, (1, 2, 3, 4, 5)),
        (4, (1, 2, 3)),
        (2, (1,)),
        (1, (1,)),
    ],
)
def test_states_are_the_published_ones_where_they_differ(num_layers: int, expected: tuple[int, ...]) -> None:
    assert published_layers(num_layers) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 1}, "block_size is 1: it must be at least 2"),
        ({"block_size": 0, "predict_at_anchor": True}, "block_size is 0: it must be at least 1"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"mask_token_id": 20}, "mask_token_id is 20: the target embeds 20 tokens"),
        ({"capture_layers": []}, "capture_layers is empty"),
        ({"num_layers": 0}, "num_layers is 0"),
    ],
)
def test_senseless_sizes_are_refused(arguments: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(UserError, match=message):
        DFlashDrafter(target, DraftVocab(20), **arguments)
