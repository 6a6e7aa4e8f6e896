"""The whole model: isolation of documents, padding, prefix sharing, replay, decoding, empty batches, bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moekit import ops
from moekit.config import DataConfig
from moekit.data.batch import Batch
from moekit.data.chat import Document
from moekit.data.pack import build_rows
from moekit.errors import ConfigError, DataError
from moekit.model.presets import PRESETS, parameter_counts, preset
from moekit.model.transformer import Transformer, logits
from moekit.objectives.sft import SFT

VARIANTS = ["plain", "olmoe", "qwen3", "mixtral", "sigmoid", "dense+shared"]


def close(a, b, tolerance=1e-11):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["packed", "interleaved", "padded"])
def test_a_packed_document_equals_the_document_alone(small, kind, variant):
    made, batch = small.model(variant), small.batch(kind)
    together = logits(made, batch)
    for row in range(batch.rows):
        for s in range(int(batch.segment[row].max()) + 1):
            where = batch.segment[row] == s
            alone = logits(made, Batch.make(batch.input_ids[row, where][None]))
            close(together[row, where], alone[0])


def test_loss_and_gradients_of_packed_rows_are_the_sum_over_documents(small):
    made, batch = small.model("qwen3"), small.batch("packed", labels="all")
    loss = -made(batch).logprob_M.sum()
    total, grads = 0.0, None
    for row in range(batch.rows):
        for s in range(int(batch.segment[row].max()) + 1):
            one = -made(Batch.make(batch.input_ids[row, batch.segment[row] == s][None])).logprob_M.sum()
            found = small.gradients(made, one)
            total += one.item()
            grads = found if grads is None else {n: g + found[n] for n, g in grads.items()}
    assert abs(total - loss.item()) <= 1e-11 * abs(total)
    assert small.distance(small.gradients(made, loss), grads) <= 1e-11


@pytest.mark.parametrize("elide", ["none", "padding", "padding+last_layer"])
def test_what_padding_holds_does_not_matter(small, elide):
    """Values and all gradients; also the embedding's, whose pad rows get gradient zero."""
    made, batch = small.model("olmoe"), small.batch("padded")
    other = replace(batch, input_ids=torch.where(batch.segment < 0, 7 * batch.input_ids % 50, batch.input_ids))
    assert not torch.equal(batch.input_ids, other.input_ids)
    a, b = made(batch, elide=elide), made(other, elide=elide)
    close(a.logprob_M, b.logprob_M, 1e-13)
    assert small.distance(small.gradients(made, a.logprob_M.sum()), small.gradients(made, b.logprob_M.sum())) <= 1e-12


@pytest.mark.parametrize("variant", ["plain", "qwen3", "sigmoid"])
def test_a_shared_prompt_equals_two_whole_documents(small, variant):
    """Prompt 4 tokens: 3 shared, the last one starts each child. Outputs, loss and gradient as if written out twice."""
    made = small.model(variant)
    prompt, answers = [3, 1, 4, 1], ([5, 9, 2], [6, 5])
    shared = Batch.make(
        torch.tensor([prompt[:-1] + [prompt[-1]] + answers[0] + [prompt[-1]] + answers[1]]),
        segment=torch.tensor([[0] * 3 + [1] * 4 + [2] * 3]),
        parent=torch.tensor([[-1] * 3 + [0] * 7]),
    )
    assert shared.position[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 5]
    masked = shared.labels.clone()
    masked[0, :3] = -100
    shared = replace(shared, labels=masked)
    out = logits(made, shared)[0]
    whole = [Batch.make(torch.tensor([prompt + a])) for a in answers]
    loss, children = 0.0, (out[3:7], out[7:10])
    for batch, child in zip(whole, children):
        alone = logits(made, batch)[0]
        close(out[:3], alone[:3])
        close(child, alone[3:])
        labels = batch.labels.clone()
        labels[0, :3] = -100
        loss = loss + made(replace(batch, labels=labels)).logprob_M.sum()
    want = small.gradients(made, loss)
    for elide in ("padding", "padding+last_layer"):
        got = made(shared, elide=elide).logprob_M.sum()
        close(got, loss)
        assert small.distance(small.gradients(made, got), want) <= 1e-11


@pytest.mark.parametrize("variant", VARIANTS)
def test_bc_108_left_padding_is_not_seen(small, variant):
    """BC-108: [5, 6] alone and with two pads before it: positions 0 and 1, the same logits, pads routed nowhere."""
    made = small.model(variant)
    alone = Batch.make(torch.tensor([[5, 6]]))
    padded = Batch.make(torch.tensor([[7, 0, 5, 6]]), segment=torch.tensor([[-1, -1, 0, 0]]))
    assert padded.position[0, 2:].tolist() == [0, 1] and padded.labels.tolist() == [[-100, -100, 6, -100]]
    close(logits(made, padded)[0, 2:], logits(made, alone)[0])
    close(made(padded).logprob_M, made(alone).logprob_M)
    seen = [small.Watcher(), small.Watcher()]
    for batch, watch in zip((padded, alone), seen):
        made(batch, observer=watch)
    for layer, (_, dispatched_CE, *_) in seen[0].forward.items():
        assert torch.equal(dispatched_CE, seen[1].forward[layer][1]) and int(dispatched_CE.sum()) == 2 * 2


def test_bc_001_one_shift_from_rows_to_loss(small):
    """BC-001: labels of rows and derived ones, through head and loss. States that read the next token: 0, the present
    one: 50."""
    ids = torch.tensor([[10, 11, 12, 20, 21, 2]])
    made = small.model(vocab=32, width=32, layers=1, dtype=torch.float64)
    with torch.no_grad():
        made.final_norm.weight.fill_(50 / 32**0.5)  # the norm of a one-hot state is sqrt(32)
        made.head.weight.copy_(torch.eye(32))
    document = Document(ids[0].tolist(), [False] * 3 + [True] * 3)
    rows = build_rows([document], DataConfig(length=6, rows="padded")).batch()
    for batch, count in ((rows, 3), (Batch.make(ids), 5)):
        flat = batch.flat
        for token, want in ((torch.cat((ids[0, 1:], ids[0, :1])), 0.0), (ids[0], 50.0)):
            states_ND = 1e3 * F.one_hot(token, 32).double()[flat.order_N]  # the norm's eps is nothing beside
            loss_M = SFT()(flat, made.finish(states_ND, flat)).loss_M
            assert len(loss_M) == count and (loss_M - want).abs().max() < 1e-6


def test_values_of_a_bfloat16_model_are_not_rounded_to_bfloat16(small):
    """Two answers whose scores differ by less than bfloat16 can say would be a tie, and a tie is no win."""
    critic = small.model(dtype=torch.bfloat16, value_head=True)
    out = critic(small.batch("packed"))
    want = out.hidden_MD.double() @ critic.head_weight.double()[0]
    torch.testing.assert_close(out.value_M.double(), want, rtol=1e-5, atol=1e-6)


def test_values_have_no_temperature(small):
    """BC-087: only log-probs are divided by it."""
    batch = small.batch("padded")
    policy, critic = small.model(), small.model(value_head=True)
    assert torch.equal(critic(batch, temperature=0.5).value_M, critic(batch).value_M)
    assert not torch.equal(policy(batch, temperature=0.5).logprob_M, policy(batch).logprob_M)


def test_logprobs_are_those_of_the_logits_in_flat_order(small):
    made, batch = small.model("dense+shared"), small.batch("interleaved")
    out = made(batch)
    table = logits(made, batch).log_softmax(-1)
    flat = batch.flat
    places = flat.order_N[flat.label_index_M]
    want = table.view(-1, 50)[places, batch.labels.reshape(-1)[places]]
    close(out.logprob_M, want)
    assert out.hidden_MD.shape == (len(places), 16) and out.routes is None and out.hidden_ND is None


@pytest.mark.parametrize("elide", ["none", "padding", "padding+last_layer"])
def test_replayed_routes_reproduce_the_outputs(small, elide):
    made, batch = small.model("qwen3"), small.batch("packed")
    first = made(batch, elide=elide, record=True)
    replay = [r.expert_NK for r in first.routes]
    again = made(batch, elide=elide, replay=replay)
    assert torch.equal(first.logprob_M, again.logprob_M)
    turned = made(batch, elide=elide, replay=[(e + 1) % 6 for e in replay], record=True)
    assert all(torch.equal(r.expert_NK, (e + 1) % 6) for r, e in zip(turned.routes, replay))
    assert not torch.allclose(first.logprob_M, turned.logprob_M)


@pytest.mark.parametrize("variant", ["plain", "mixtral", "dense+shared"])
def test_reference_backend_agrees(small, variant):
    made, batch = small.model(variant), small.batch("shared")
    fast = made(batch).logprob_M
    grads = small.gradients(made, fast.sum())
    before = ops.set_backend("reference")
    try:
        plain = made(batch).logprob_M
        want = small.gradients(made, plain.sum())
    finally:
        ops.set_backend(before)
    close(fast, plain)
    assert small.distance(grads, want) <= 1e-11


@pytest.mark.parametrize("elide", ["none", "padding", "padding+last_layer"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_of_no_rows_runs_forward_and_backward(small, variant, elide):
    made, watch = small.model(variant), small.Watcher()
    out = made(small.batch("packed").empty(), elide=elide, observer=watch)
    loss = out.logprob_M.sum()
    loss.backward()
    assert loss.item() == 0 and all(int(t.sum()) == 0 for seen in watch.forward.values() for t in seen)
    assert all(p.grad is None or not p.grad.any() for p in made.parameters())


def test_no_label_at_all(small):
    made, batch = small.model(), small.batch("packed")
    bare = replace(batch, labels=torch.full_like(batch.labels, -100))
    for elide in ("padding", "padding+last_layer"):
        loss = made(bare, elide=elide).logprob_M.sum()
        assert loss.item() == 0 and all(not g.any() for g in small.gradients(made, loss).values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_low_precision_stays_near_float64(small, variant):
    """Routes replayed, so that a flipped near-tie is not taken for rounding."""
    wide, batch = small.model(variant), small.batch("packed")
    want = wide(batch, record=True)
    replay = [r.expert_NK for r in want.routes]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        narrow = small.model(variant, dtype=dtype)
        got = narrow(batch, replay=replay)
        assert got.logprob_M.dtype == torch.float32
        assert (got.logprob_M.double() - want.logprob_M).norm() <= tolerance * want.logprob_M.norm()
        got.logprob_M.sum().backward()
        assert all(p.grad.dtype == dtype for p in narrow.parameters())


def test_same_seed_same_weights_in_every_dtype_and_no_global_randomness():
    state = torch.get_rng_state()
    a, b = (Transformer(preset("tiny"), dtype=d, seed=3) for d in (torch.float64, torch.bfloat16))
    assert torch.equal(state, torch.get_rng_state())
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        assert torch.equal(p.to(torch.bfloat16), q), name
    assert abs(a.layers[0].moe.gate_up.std().item() - 0.02) < 2e-4


def test_parameter_names_and_shapes(small):
    """Checkpoints rely on these."""
    made = small.model("sigmoid", qk_norm="head", shared_width=4, dense_layers=(1,), dense_width=10)
    shapes = {n: tuple(p.shape) for n, p in made.named_parameters()}
    assert {n: s for n, s in shapes.items() if not n.startswith("layers.2.")} == {
        "embed.weight": (50, 16),
        "layers.0.attention_norm.weight": (16,),
        "layers.0.attention.qkv.weight": (32, 16),
        "layers.0.attention.out.weight": (16, 16),
        "layers.0.attention.q_norm.weight": (4,),
        "layers.0.attention.k_norm.weight": (4,),
        "layers.0.ffn_norm.weight": (16,),
        "layers.0.moe.router.weight": (6, 16),
        "layers.0.moe.gate_up": (6, 16, 16),
        "layers.0.moe.down": (6, 16, 8),
        "layers.0.moe.shared.gate_up.weight": (8, 16),
        "layers.0.moe.shared.down.weight": (16, 4),
        "layers.1.attention_norm.weight": (16,),
        "layers.1.attention.qkv.weight": (32, 16),
        "layers.1.attention.out.weight": (16, 16),
        "layers.1.attention.q_norm.weight": (4,),
        "layers.1.attention.k_norm.weight": (4,),
        "layers.1.ffn_norm.weight": (16,),
        "layers.1.dense.gate_up.weight": (20, 16),
        "layers.1.dense.down.weight": (16, 10),
        "final_norm.weight": (16,),
        "head.weight": (50, 16),
    }
    assert [n for n, _ in made.named_buffers()] == [f"layers.{i}.moe.router.selection_bias" for i in (0, 2)]
    assert "head.weight" not in dict(small.model("dense+shared").named_parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_predicted_parameter_counts_are_the_real_ones(small, variant):
    made = small.model(variant)
    counts = parameter_counts(made.config)
    assert counts["total"] == sum(p.numel() for p in made.parameters())
    assert counts["total"] == sum(n for part, n in counts.items() if part not in ("total", "active"))


def test_published_sizes():
    """Totals as published: 6.9B, 30.5B, 46.7B; active 1.3B, 3.3B (3.35 with our count), 12.9B."""
    billions = {n: (round(c["total"] / 1e9, 1), round(c["active"] / 1e9, 1)) for n in PRESETS
                for c in [parameter_counts(preset(n))]}  # fmt: skip
    assert billions["OLMoE-1B-7B"] == (6.9, 1.3)
    assert billions["Qwen3-30B-A3B"] == (30.5, 3.4)
    assert billions["Mixtral-8x7B"] == (46.7, 12.9)


def test_bad_input_is_named(small):
    made = small.model()
    with pytest.raises(DataError, match=r"token 50 is outside 0\.\.49"):
        made(Batch.make(torch.tensor([[1, 50, 2]])))
    with pytest.raises(DataError, match=r"position 64 is outside 0\.\.63"):
        made(Batch.make(torch.zeros(1, 65, dtype=torch.long)))
    with pytest.raises(ConfigError, match="'all' is not one of"):
        made(small.batch("full"), elide="all")
    with pytest.raises(ConfigError, match="replay has 1 layers of routes, the model 3"):
        made(small.batch("full"), replay=[torch.zeros(24, 2, dtype=torch.long)])
    with pytest.raises(ConfigError, match="keep_hidden"):
        made(small.batch("full"), elide="padding+last_layer", keep_hidden=True)
    with pytest.raises(ConfigError, match="no preset 'huge'"):
        preset("huge")
