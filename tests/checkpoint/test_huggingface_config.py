"""config.json of the three families: the file, then the family's own default; what cannot be held is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig, Qwen3MoeModel

from moekit.checkpoint.export import choose_family, config_to_hf
from moekit.checkpoint.families import FAMILIES, config_from_hf
from moekit.checkpoint.huggingface import check_tokenizer, read_config
from moekit.config import ModelConfig
from moekit.errors import CheckpointError, ConfigError
from moekit.model.router import Router

CLASSES = {"olmoe": OlmoeConfig, "qwen3_moe": Qwen3MoeConfig, "mixtral": MixtralConfig}
SMALL = {"vocab_size": 64, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}


def model_config(**changes) -> ModelConfig:
    """A model that Qwen3-MoE can hold."""
    shape = {"vocab": 67, "width": 24, "layers": 3, "heads": 4, "kv_heads": 2, "qk_norm": "head"}
    return ModelConfig(**{**shape, "experts": 5, "top_k": 2, "expert_width": 10, **changes})


@pytest.mark.parametrize("name", FAMILIES)
def test_an_absent_key_has_the_default_of_that_familys_class(name):
    hf, ours = CLASSES[name](), config_from_hf({"model_type": name})
    width = hf.moe_intermediate_size if name == "qwen3_moe" else hf.intermediate_size
    assert ours == ModelConfig(
        vocab=hf.vocab_size,
        width=hf.hidden_size,
        layers=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=hf.hidden_size // hf.num_attention_heads,
        experts=hf.num_experts,
        top_k=hf.num_experts_per_tok,
        expert_width=width,
        normalize_gates=getattr(hf, "norm_topk_prob", True),
        qk_norm={"olmoe": "full", "qwen3_moe": "head", "mixtral": "none"}[name],
        norm_eps=hf.rms_norm_eps,
        rope_theta=hf.rope_parameters["rope_theta"],
        max_positions=hf.max_position_embeddings,
        tied_head=hf.tie_word_embeddings,
        init_std=hf.initializer_range,
        family=name,
        bos_id=hf.bos_token_id,
        eos_id=hf.eos_token_id,
        pad_id=hf.pad_token_id,
    )


@pytest.mark.parametrize(
    ("values", "gates"),
    [
        ({"model_type": "qwen3_moe", "norm_topk_prob": True}, [4 / 7, 3 / 7]),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, [0.4, 0.3]),
        ({"model_type": "qwen3_moe"}, [0.4, 0.3]),
        ({"model_type": "mixtral"}, [4 / 7, 3 / 7]),
    ],
)
def test_bc_074_norm_topk_prob_follows_the_file_then_the_class(tmp_path, values, gates):
    (tmp_path / "config.json").write_text(json.dumps({**values, **SMALL, "num_experts": 4, "num_experts_per_tok": 2}))
    router = Router(read_config(tmp_path), torch.float32)
    with torch.no_grad():
        router.weight.zero_()[:, 0] = torch.tensor([math.log(4), math.log(3), math.log(2), 0.0])
    route = router(torch.eye(1, 24))
    assert route.expert_NK.tolist() == [[0, 1]]
    torch.testing.assert_close(route.gate_NK, torch.tensor([gates]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("sparse", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": [1, 3]}, (1, 3)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, (0, 1, 2, 4)),
    ],
)
def test_dense_layers_of_qwen3_moe(sparse, dense):
    values = {"model_type": "qwen3_moe", **SMALL, "num_hidden_layers": 5, "intermediate_size": 40, **sparse}
    config = config_from_hf(values)
    assert config.dense_layers == dense
    assert config.dense_width == (40 if dense else 0)
    with torch.device("meta"):  # the layers that Transformers itself makes dense
        blocks = Qwen3MoeModel(Qwen3MoeConfig(**{k: v for k, v in values.items() if k != "model_type"})).layers
    assert dense == tuple(i for i, block in enumerate(blocks) if not hasattr(block.mlp, "experts"))


@pytest.mark.parametrize("name", FAMILIES)
def test_rope_base_and_expert_count_under_their_old_and_new_names(name):
    for rope in (
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": None, "rope_theta": 500000},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    ):
        assert config_from_hf({"model_type": name, **SMALL, **rope}).rope_theta == 5e5
    for key in ("num_experts", "num_local_experts"):
        assert config_from_hf({"model_type": name, **SMALL, key: 13}).experts == 13
    with pytest.raises(CheckpointError, match=r"two different numbers of experts.*13.*12"):
        config_from_hf({"model_type": name, **SMALL, "num_experts": 13, "num_local_experts": 12})
    with pytest.raises(CheckpointError, match=r"two different rotary bases"):
        config_from_hf({"model_type": name, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("olmoe", "clip_qkv", 8.0),
        ("olmoe", "attention_bias", True),
        ("qwen3_moe", "attention_bias", True),
        ("olmoe", "head_dim", 32),
        ("olmoe", "hidden_act", "gelu"),
        ("mixtral", "sliding_window", 4096),
        ("mixtral", "router_jitter_noise", 0.1),
        ("mixtral", "attention_dropout", 0.1),
        ("qwen3_moe", "rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("qwen3_moe", "rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        ("qwen3_moe", "partial_rotary_factor", 0.5),
        ("qwen3_moe", "layer_types", ["full_attention", "sliding_attention"]),
        ("mixtral", "quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_a_feature_that_moekit_lacks_is_refused_by_name_and_value(name, key, value):
    with pytest.raises(CheckpointError) as error:
        config_from_hf({"model_type": name, key: value}, "somewhere/config.json")
    assert "somewhere/config.json" in str(error.value)
    assert f"{key}={value!r}" in str(error.value)


def test_all_refused_features_are_in_one_error():
    with pytest.raises(CheckpointError, match=r"clip_qkv=8.*attention_dropout|attention_dropout.*clip_qkv=8"):
        config_from_hf({"model_type": "olmoe", "clip_qkv": 8, "attention_dropout": 0.5})


def test_a_window_that_hides_nothing_is_accepted():
    assert config_from_hf({"model_type": "mixtral", "sliding_window": 4096, "max_position_embeddings": 4096})
    assert config_from_hf({"model_type": "qwen3_moe", "sliding_window": 4096, "use_sliding_window": False})
    with pytest.raises(CheckpointError, match="sliding_window=4096"):
        config_from_hf({"model_type": "qwen3_moe", "use_sliding_window": True})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama'.*olmoe, qwen3_moe, mixtral"),
        ({}, "model_type=None"),
        ({"model_type": "olmoe", "hidden_size": "2048"}, "hidden_size='2048' is not an integer"),
        ({"model_type": "olmoe", "num_hidden_layers": True}, "num_hidden_layers=True is not an integer"),
        ({"model_type": "olmoe", "rms_norm_eps": None}, "rms_norm_eps=None is not a number"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "top_k=3 is larger"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    ],
)
def test_a_config_that_cannot_be_is_one_clear_error(values, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_hf(values)


def test_special_ids():
    read = lambda **ids: config_from_hf({"model_type": "qwen3_moe", **SMALL, **ids})
    assert read(eos_token_id=[7, 9]).eos_id == 7
    assert read(eos_token_id=64).eos_id is None  # no token has it: the vocabulary ends at 63
    assert read(pad_token_id=0).pad_id == 0
    assert config_from_hf({"model_type": "olmoe", **SMALL, "pad_token_id": None}).pad_id is None


@pytest.mark.parametrize("name", FAMILIES)
def test_what_we_write_is_what_transformers_and_we_read(name):
    fits = {"olmoe": {"qk_norm": "full"}, "mixtral": {"qk_norm": "none", "normalize_gates": True, "head_dim": 8}}
    rest = {"norm_eps": 3e-6, "rope_theta": 7e4, "max_positions": 99, "init_std": 0.1}
    rest |= {"bos_id": 3, "eos_id": 4, "pad_id": 5}
    dense = {"dense_layers": (1,), "dense_width": 14, "head_dim": 8, "tied_head": True}
    config = model_config(**fits.get(name, dense), **rest, family=name)
    written = json.loads(json.dumps(config_to_hf(config, choose_family(config), "float32")))
    assert config_from_hf(written) == config
    hf = CLASSES[name].from_dict(written)
    assert json.loads(hf.to_json_string(use_diff=False))["rope_parameters"]["rope_theta"] == 7e4
    assert config_from_hf(json.loads(hf.to_json_string(use_diff=False))) == config


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("qwen3_moe", {"selection_bias": True}, "selection_bias=True"),
        ("qwen3_moe", {"shared_width": 16}, r"shared experts \(shared_width=16\)"),
        ("qwen3_moe", {"gate": "sigmoid"}, "gate='sigmoid'"),
        ("qwen3_moe", {"qk_norm": "full"}, "qk_norm='full'.*'head'"),
        ("olmoe", {"qk_norm": "full", "dense_layers": (0,), "dense_width": 8}, r"dense_layers=\(0,\)"),
        ("olmoe", {"qk_norm": "full", "head_dim": 8}, "head_dim=8.*6"),
        ("mixtral", {"qk_norm": "none"}, "normalize_gates=False"),
        (
            "mixtral",
            {"qk_norm": "none", "normalize_gates": True, "dense_layers": (0,), "dense_width": 8},
            "dense_layers",
        ),
    ],
)
def test_export_refuses_by_name_what_the_family_cannot_hold(name, changes, named):
    with pytest.raises(ConfigError, match=named):
        choose_family(model_config(**changes), name)


def test_export_needs_a_family_and_says_which_would_do():
    with pytest.raises(ConfigError, match="needs a Hugging Face family.*can hold this model: qwen3_moe$"):
        choose_family(model_config())
    both = {"selection_bias": True, "gate": "sigmoid"}
    with pytest.raises(ConfigError, match="selection_bias=True; gate='sigmoid'.*none of olmoe"):
        choose_family(model_config(**both), "qwen3_moe")
    assert choose_family(model_config(), "qwen3_moe").name == "qwen3_moe"
    assert choose_family(model_config(qk_norm="none", gate="topk_softmax"), "mixtral").name == "mixtral"


def test_tokenizer_and_model_vocabulary():
    class Tokenizer:
        def get_vocab(self):
            return {"a": 0, "b": 1, "c": 99}

    check_tokenizer(model_config(vocab=100), Tokenizer())
    with pytest.raises(ConfigError, match=r"3 tokens with ids up to 99, the model vocab=99"):
        check_tokenizer(model_config(vocab=99), Tokenizer())
