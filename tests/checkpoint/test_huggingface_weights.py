"""Weights in and out of Hugging Face folders: logits equal Transformers' both ways, and every misfit is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from moekit.checkpoint import huggingface
from moekit.config import ModelConfig
from moekit.data.batch import Batch
from moekit.errors import CheckpointError, ConfigError, NumericsError
from moekit.learner.weights import export, load
from moekit.model.transformer import Transformer, logits

INDEX = "model.safetensors.index.json"
SHAPE = {
    "vocab_size": 67,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
QWEN = {"moe_intermediate_size": 10, "intermediate_size": 14, "head_dim": 8, "num_hidden_layers": 3}
MODELS = {
    "olmoe": OlmoeConfig(**SHAPE, num_experts=5, intermediate_size=10, num_hidden_layers=2),
    "olmoe norm": OlmoeConfig(
        **SHAPE, num_experts=5, intermediate_size=10, num_hidden_layers=2, norm_topk_prob=True, rms_norm_eps=1e-3
    ),
    "qwen3": Qwen3MoeConfig(**SHAPE, **QWEN, num_experts=5, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen3 raw tied": Qwen3MoeConfig(
        **SHAPE, **QWEN, num_experts=5, decoder_sparse_step=2, tie_word_embeddings=True, rope_theta=1e6
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5, intermediate_size=10, num_hidden_layers=2, head_dim=8),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def oracle(config):
    """Transformers' own model with weights large enough that routing, norms and rotation all matter."""
    # its fused expert kernel wants strides of 16 bytes, these shapes are uneven on purpose
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.3 * noise)
    return model.eval()


def reload(path):
    """What `AutoModelForCausalLM` makes of a folder, and what it complains about."""
    model, told = AutoModelForCausalLM.from_pretrained(
        path, experts_implementation="eager", output_loading_info=True, dtype="auto"
    )
    assert not any(told.values()), told
    return model.eval()


IDS = torch.randint(0, 67, (2, 17), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def difference(hf, ours: Transformer) -> float:
    """max |a - b| / max |a| of the logits."""
    a, b = hf(IDS).logits, logits(ours, Batch.make(IDS))
    return float((a - b).abs().max() / a.abs().max())


def tiny(**changes) -> ModelConfig:
    """A small Mixtral-like config for hand-made cases."""
    shape = {"vocab": 5, "width": 2, "layers": 1, "heads": 1, "head_dim": 2, "experts": 2, "top_k": 1}
    rest = {"expert_width": 3, "normalize_gates": True, "family": "mixtral"}
    return ModelConfig(**{**shape, **rest, **changes})


def experts_output(model: Transformer, x: torch.Tensor) -> torch.Tensor:
    """The first layer's routed experts on x [N, D]."""
    flat = Batch.make(torch.zeros(1, x.shape[0], dtype=torch.int64)).flat
    return model.layers[0].moe(x, flat, real=x.shape[0])[0].detach()


@pytest.mark.parametrize("naming", ["per_expert", "fused"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_both_ways(tmp_path, name, naming):
    hf = oracle(MODELS[name])
    theirs = tmp_path / "theirs"
    hf.save_pretrained(theirs, max_shard_size="20KB" if name == "qwen3" else "1GB")
    if naming == "fused":  # the names that Transformers' modules have in memory
        state = hf.state_dict()
        if hf.config.tie_word_embeddings:
            del state["lm_head.weight"]
        for file in theirs.glob("model*"):
            file.unlink()
        save_file({n: t.clone() for n, t in state.items()}, theirs / "model.safetensors")
    ours = load(theirs)
    assert difference(hf, ours) < 1e-5

    written = export(ours, tmp_path / "ours", naming=naming, max_shard_bytes=20_000 if name == "olmoe" else 10**9)
    again = reload(written)
    assert difference(again, ours) < 1e-5
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in hf.state_dict().items())
    assert (written / INDEX).exists() == (name == "olmoe")
    names = {n for file in written.glob("*.safetensors") for n in load_numpy(file)}
    assert any("experts.gate_up_proj" in n for n in names) == (naming == "fused")

    second = load(written)
    assert second.config == ours.config
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), second.parameters(), strict=True))


def test_both_namings_in_one_folder(tmp_path):
    hf = oracle(MODELS["mixtral"])
    hf.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for e in range(5):
        del tensors[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"]
    tensors["model.layers.1.mlp.experts.down_proj"] = hf.state_dict()["model.layers.1.mlp.experts.down_proj"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert difference(hf, load(tmp_path)) < 1e-5


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, torch.float64, torch.float64),
    ],
)
def test_dtype(tmp_path, stored, asked, got):
    hf = oracle(MODELS["mixtral"]).to(stored)
    hf.save_pretrained(tmp_path)
    model = load(tmp_path, dtype=asked)
    assert {p.dtype for p in model.parameters()} == {got}
    torch.testing.assert_close(model.embed.weight, hf.model.embed_tokens.weight.to(got), rtol=0, atol=0)
    assert reload(export(model, tmp_path / "again")).dtype == got
    with pytest.raises(ConfigError, match="dtype=torch.int8 is not one of float32"):
        load(tmp_path, dtype=torch.int8)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}  # float32 in old files; not a weight
    save_file(load_file(tmp_path / "model.safetensors") | frequencies, tmp_path / "model.safetensors")
    assert asked or load(tmp_path).embed.weight.dtype == got


def test_bc_062_every_parameter_is_written_and_a_misnamed_tensor_is_an_error(tmp_path):
    oracle(MODELS["mixtral"]).save_pretrained(tmp_path)
    model = Transformer(huggingface.read_config(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    huggingface.load_into(model, tmp_path)
    assert sum(int(p.isnan().sum()) for p in model.parameters()) == 0

    tensors = load_file(tmp_path / "model.safetensors")
    right = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    tensors[right.replace("w2", "w9")] = tensors.pop(right)
    save_file(tensors, tmp_path / "model.safetensors")
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError) as error:
        huggingface.load_into(model, tmp_path)
    assert f"1 missing: {right}" in str(error.value)
    assert f"1 not expected: {right.replace('w2', 'w9')}" in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_everything_that_does_not_fit_is_in_one_error(tmp_path):
    oracle(MODELS["olmoe"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.gate.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(24)
    tensors["lm_head.weight"] = torch.zeros(66, 24)
    expert = "model.layers.0.mlp.experts.3.down_proj.weight"
    tensors[expert] = tensors[expert].T.contiguous()
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(5, 24, dtype=torch.int8)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)  # what old files hold, and nothing needs
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    text = str(error.value)
    assert "2 missing: model.layers.1.mlp.gate.weight, model.norm.weight" in text
    assert "1 not expected: model.layers.0.self_attn.q_proj.bias" in text
    assert "2 of another shape: lm_head.weight (66, 24) where the model has (67, 24)" in text
    assert f"{expert} (10, 24) where the model has (24, 10)" in text
    assert "1 of another kind: model.layers.0.mlp.gate.weight I8" in text
    assert "inv_freq" not in text


def test_a_long_list_of_missing_tensors_stays_readable(tmp_path):
    oracle(MODELS["olmoe"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if ".mlp." not in n}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert "32 missing" in str(error.value)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 20}))
    with pytest.raises(CheckpointError, match=r"model.layers.\*.mlp.experts.\*.up_proj.weight \(40 of them\)"):
        load(tmp_path)


def test_bc_068_fused_and_split_experts_hold_the_same_numbers(tmp_path):
    config = tiny(family="olmoe", qk_norm="full")
    model = Transformer(config)
    e, part, row, col = torch.meshgrid(*(torch.arange(n) for n in (2, 2, 3, 2)), indexing="ij")
    code = (1000 * e + 100 * part + 10 * row + col).float()  # [E, gate or up, F, D]
    with torch.no_grad():
        model.layers[0].moe.gate_up.copy_(code.reshape(2, 6, 2))
    split = load_numpy(export(model, tmp_path / "split") / "model.safetensors")
    for i in range(2):
        for j, name in enumerate(("gate_proj", "up_proj")):
            assert split[f"model.layers.0.mlp.experts.{i}.{name}.weight"].tolist() == code[i, j].tolist()
    fused = load_numpy(export(load(tmp_path / "split"), tmp_path / "fused", naming="fused") / "model.safetensors")
    merged = fused["model.layers.0.mlp.experts.gate_up_proj"]
    assert merged.shape == (2, 6, 2)
    assert merged[:, :3].tolist() == code[:, 0].tolist()
    assert merged[:, 3:].tolist() == code[:, 1].tolist()
    back = load_numpy(export(load(tmp_path / "fused"), tmp_path / "back") / "model.safetensors")
    assert back.keys() == split.keys()
    assert all((back[n] == split[n]).all() for n in split)


def test_bc_068_gate_comes_first(tmp_path):
    model = Transformer(tiny(width=1, expert_width=1, experts=1))
    with torch.no_grad():
        model.layers[0].moe.gate_up.copy_(torch.tensor([[[1.0], [2.0]]]))
        model.layers[0].moe.down.fill_(1.0)
    for naming in ("per_expert", "fused"):
        got = experts_output(load(export(model, tmp_path / naming, naming=naming)), torch.ones(1, 1))
        assert float(got) == pytest.approx(1.4621172, abs=1e-6)


def test_bc_069_mixtral_w1_w3_w2_are_gate_up_down(tmp_path):
    export(Transformer(tiny(width=1, expert_width=1, experts=1)), tmp_path / "one")
    file = tmp_path / "one" / "model.safetensors"
    tensors = load_file(file)
    for name, value in {"w1": 1.0, "w3": 2.0, "w2": 3.0}.items():
        tensors[f"model.layers.0.block_sparse_moe.experts.0.{name}.weight"] = torch.tensor([[value]])
    save_file(tensors, file)
    model = load(tmp_path / "one")
    assert float(experts_output(model, torch.ones(1, 1))) == pytest.approx(4.3863515, abs=1e-6)
    written = load_numpy(export(model, tmp_path / "two") / "model.safetensors")
    assert all((written[n] == t.numpy()).all() for n, t in tensors.items())

    shapes = load_numpy(export(Transformer(tiny()), tmp_path / "three") / "model.safetensors")
    experts = "model.layers.0.block_sparse_moe.experts.1"
    assert [shapes[f"{experts}.{w}.weight"].shape for w in ("w1", "w3", "w2")] == [(3, 2), (3, 2), (2, 3)]
    assert load(tmp_path / "three").layers[0].moe.gate_up.shape == (2, 6, 2)


def test_bc_070_a_tied_head_is_stored_once_and_shared_again(tmp_path):
    model = Transformer(tiny(vocab=2, tied_head=True), seed=1)
    size = sum(p.numel() * 4 for p in model.parameters())
    written = export(model, tmp_path / "tied", max_shard_bytes=size * 2 // 3)
    where = json.loads((written / INDEX).read_text())["weight_map"]
    assert len(set(where.values())) == 2
    assert "lm_head.weight" not in where
    for name, file in where.items():
        with safe_open(written / file, framework="numpy") as f:
            assert f.get_tensor(name).size > 0
    stored = {n for file in set(where.values()) for n in load_numpy(written / file)}
    assert stored == set(where)
    again = load(written)
    assert again.head_weight is again.embed.weight
    batch = Batch.make(torch.tensor([[0, 1, 1, 0]]))
    assert torch.equal(logits(model, batch), logits(again, batch))
    hf = reload(written)
    assert hf.lm_head.weight.data_ptr() == hf.model.embed_tokens.weight.data_ptr()


def test_a_tied_head_stored_twice_must_be_the_embedding(tmp_path):
    file = export(Transformer(tiny(tied_head=True)), tmp_path / "tied") / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert load(tmp_path / "tied").head is None
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match="lm_head.weight of its own although tie_word_embeddings is true"):
        load(tmp_path / "tied")


def turned(rows: list[list[int]]) -> torch.nn.Parameter:
    """The transpose of `rows` as the only expert's matrix: a view, not contiguous."""
    return torch.nn.Parameter(torch.tensor([rows], dtype=torch.float32).transpose(1, 2))


def test_bc_072_a_transposed_view_is_stored_as_it_reads(tmp_path):
    model = Transformer(tiny(experts=1))
    layer = model.layers[0]
    layer.moe.gate_up = turned([[1, 2, 3, 7, 8, 9], [4, 5, 6, 10, 11, 12]])  # [1, 6, 2]
    layer.moe.down = turned([[1, 4], [2, 5], [3, 6]])  # [1, 2, 3]
    layer.attention.out.weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T)
    assert not any(p.is_contiguous() for p in (layer.moe.gate_up, layer.moe.down, layer.attention.out.weight))
    for naming in ("per_expert", "fused"):
        stored = load_numpy(export(model, tmp_path / naming, naming=naming) / "model.safetensors")
        assert stored["model.layers.0.self_attn.o_proj.weight"].tolist() == [[1, 3], [2, 4]]
        if naming == "fused":
            assert stored["model.layers.0.mlp.experts.down_proj"].tolist() == [[[1, 2, 3], [4, 5, 6]]]
        else:
            assert stored["model.layers.0.block_sparse_moe.experts.0.w1.weight"].tolist() == [[1, 4], [2, 5], [3, 6]]
            assert stored["model.layers.0.block_sparse_moe.experts.0.w3.weight"].tolist() == [[7, 10], [8, 11], [9, 12]]
            assert stored["model.layers.0.block_sparse_moe.experts.0.w2.weight"].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_numbers_are_refused_by_name(tmp_path, bad):
    model = Transformer(tiny())
    with torch.no_grad():
        model.layers[0].moe.down[1, 0, 2] = bad
    written = export(model, tmp_path / "bad")
    with pytest.raises(
        NumericsError, match=r"block_sparse_moe.experts.1.w2.weight in .*model.safetensors holds NaN or"
    ):
        load(written)
    got = load(written, allow_nonfinite=True).layers[0].moe.down
    assert torch.equal(got.isfinite(), model.layers[0].moe.down.isfinite())


def test_a_number_too_large_for_the_asked_dtype_is_refused(tmp_path):
    model = Transformer(tiny(), dtype=torch.float64)
    with torch.no_grad():
        model.final_norm.weight[0] = 1e300
    written = export(model, tmp_path / "large")
    assert load(written).final_norm.weight[0].item() == 1e300
    with pytest.raises(NumericsError, match=r"model.norm.weight .*\(as torch.float32\)"):
        load(written, dtype="float32")


def test_folders_that_cannot_be_read(tmp_path):
    good = export(Transformer(tiny(), seed=2), tmp_path / "good", max_shard_bytes=80)
    shards = sorted(good.glob("model-*"))
    assert len(shards) > 2

    def broken(change, message):
        copy = tmp_path / "broken"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(good, copy)
        change(copy)
        with pytest.raises(CheckpointError, match=message):
            load(copy)

    def index(change):
        def apply(folder):
            values = json.loads((folder / INDEX).read_text())
            change(values["weight_map"])
            (folder / INDEX).write_text(json.dumps(values))

        return apply

    with pytest.raises(CheckpointError, match="nowhere is not a folder"):
        load(tmp_path / "nowhere")
    broken(lambda f: (f / "config.json").unlink(), "it has no config.json")
    broken(lambda f: (f / "config.json").write_text('{"model_type": '), "config.json is not JSON")
    broken(lambda f: (f / "config.json").write_text("[]"), "does not hold a JSON object")
    broken(lambda f: (f / INDEX).unlink(), "neither model.safetensors nor model.safetensors.index.json")
    broken(lambda f: (f / "model.safetensors").touch(), "has both model.safetensors and")
    broken(lambda f: (f / shards[1].name).unlink(), rf"{shards[1].name} is missing")
    broken(lambda f: (f / shards[1].name).write_bytes(shards[1].read_bytes()[:-4]), rf"{shards[1].name} cannot be read")
    broken(lambda f: (f / shards[1].name).write_bytes(shards[0].read_bytes()), "is in .* and in")
    broken(lambda f: (f / INDEX).write_text("{}"), "no usable weight_map")
    broken(index(lambda m: m.update(more=f"../{shards[0].name}")), "no usable weight_map")
    broken(index(lambda m: m.update(more=shards[0].name)), "tensors that are not in the files it says: more")


def test_a_model_on_the_meta_device_is_refused(tmp_path):
    written = export(Transformer(tiny()), tmp_path / "model")
    with pytest.raises(CheckpointError, match="embed.weight is on the meta device"):
        huggingface.load_into(Transformer(tiny(), device="meta", seed=None), written)


def test_a_model_of_another_shape_is_refused(tmp_path):
    written = export(Transformer(tiny()), tmp_path / "model")
    with pytest.raises(CheckpointError) as error:
        huggingface.load_into(Transformer(tiny(experts=3)), written)
    assert "3 missing: model.layers.0.block_sparse_moe.experts.2.w1.weight" in str(error.value)
    assert "1 of another shape: model.layers.0.block_sparse_moe.gate.weight (2, 2) where the model has (3, 2)" in str(
        error.value
    )
    with pytest.raises(CheckpointError, match=r"no place for.*shared"):
        huggingface.load_into(Transformer(tiny(shared_width=4)), written)
