"""What can be served where: shapes of checkpoints that people download, each served, or refused for its one reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from quant.verify import Target, examine
from tests.quant.checkpoints import COMPRESSED_TENSORS, read_json, write_json
from tests.quant.lookalikes import compressed_tensors_linear, experts, fp8, half, modelopt_linear, write

SERVED = None
GATED, MIXTRAL = ("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3")
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*gate"]}
ROUTER = {"mlp.gate": (2, 64, half)}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}


def mixed(algorithms: dict[str, str]) -> dict[str, Any]:
    layers = {name: {"quant_algo": algorithm} for name, algorithm in algorithms.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}


def compressed(**changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(COMPRESSED_TENSORS)
    group = changes.pop("group", {})
    config["config_groups"]["group_0"].update(group)
    return config | changes


NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}
TWO_KINDS = {
    "format": "mixed-precision",
    "config_groups": {
        "a": {"format": "nvfp4-pack-quantized", "targets": ["re:.*mlp.*"], "weights": NVFP4_WEIGHTS},
        "b": {"format": "float-quantized", "targets": ["re:.*attn.*"], "weights": {"num_bits": 8, "type": "float"}},
    },
}
# name: (arguments of `write`, what a V100's refusal says, what a CPU's says: SERVED, or the same where it is "")
SHAPES: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "nvidia/Qwen3.6-35B-A3B-NVFP4": (
        {
            "architecture": "Qwen3_5MoeForConditionalGeneration",
            "quantization": mixed({"lm_head": "W4A16_NVFP4", "model.layers.0.self_attn.q_proj": "FP8"}),
            "attention": fp8,
            "more": experts(GATED, modelopt_linear) | ROUTER,
            "head": modelopt_linear,
            "config": MOE | {"tie_word_embeddings": False},
        },
        SERVED,
        SERVED,
    ),
    "nvidia/Qwen3.6-27B-NVFP4": (
        {
            "architecture": "Qwen3_5ForConditionalGeneration",
            "quantization": mixed({"mlp.gate_proj": "W4A16_NVFP4", "self_attn.q_proj": "FP8"}),
            "attention": fp8,
            "mlp": modelopt_linear,
        },
        SERVED,
        SERVED,
    ),
    "unsloth/Qwen3.8-27B-NVFP4": (
        {
            "architecture": "Qwen3_5ForConditionalGeneration",
            "quantization": compressed(**TWO_KINDS),
            "attention": fp8,
        },
        SERVED,
        SERVED,
    ),
    "nvidia/Nemotron-3-Nano-30B-A3B-NVFP4": (
        {
            "architecture": "NemotronHForCausalLM",
            "quantization": MODELOPT,
            "attention": modelopt_linear,
            "more": experts(("up_proj", "down_proj"), modelopt_linear) | ROUTER,
            "config": MOE | {"mlp_hidden_act": "relu2"},
        },
        "gated SiLU experts, the one kind computed in 4 bits, got mlp_hidden_act 'relu2'",
        "",
    ),
    "nvidia/Gemma-4-26B-A4B-NVFP4": (
        {
            "architecture": "Gemma4ForConditionalGeneration",
            "quantization": MODELOPT,
            "attention": modelopt_linear,
            "more": experts(GATED, modelopt_linear) | ROUTER,
            "config": MOE | {"hidden_activation": "gelu_pytorch_tanh"},
            "nested": True,
        },
        "gated SiLU experts, the one kind computed in 4 bits, got hidden_activation 'gelu_pytorch_tanh'",
        "",
    ),
    "poolside/Laguna-XS-2.1": (
        {"architecture": "LagunaForCausalLM", "quantization": COMPRESSED_TENSORS},
        None,
        "",
    ),
    "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4": (
        {
            "architecture": "Qwen3_5ForConditionalGeneration",
            "quantization": COMPRESSED_TENSORS,
            "nested": True,
            "config": {"mtp_num_hidden_layers": 1},
        },
        SERVED,
        SERVED,
    ),
    "nvidia/Qwen3-32B-NVFP4": (
        {
            "architecture": "Qwen3ForCausalLM",
            "quantization": MODELOPT | {"kv_cache_quant_algo": "FP8"},
            "attention": modelopt_linear,
            "mlp": modelopt_linear,
        },
        SERVED,
        SERVED,
    ),
    "nvidia/Qwen3-30B-A3B-NVFP4": (
        {
            "architecture": "Qwen3MoeForCausalLM",
            "quantization": MODELOPT,
            "attention": modelopt_linear,
            "more": experts(GATED, modelopt_linear) | ROUTER,
            "config": MOE,
        },
        SERVED,
        SERVED,
    ),
    "RedHatAI/Qwen3-32B-NVFP4A16": (
        {"architecture": "Qwen3ForCausalLM", "quantization": COMPRESSED_TENSORS},
        SERVED,
        SERVED,
    ),
    "RedHatAI/Qwen3.6-35B-A3B-NVFP4, whose draft layers no list names": (
        {
            "architecture": "Qwen3_5MoeForConditionalGeneration",
            "more": experts(GATED, half) | ROUTER,
            "quantization": compressed(ignore=["lm_head", "re:.*experts", "re:.*gate$"]),
            "config": MOE | {"mtp_num_hidden_layers": 1},
            "extra": half("mtp.layers.0.self_attn.q_proj", 64, 64),
        },
        SERVED,
        SERVED,
    ),
    "openai/gpt-oss-20b": (
        {
            "architecture": "GptOssForCausalLM",
            "quantization": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
            "attention": half,
            "mlp": half,
        },
        "mxfp4 (MXFP4: E2M1 weights with power-of-two (E8M0) scales for 32 weights): our kernels compute NVFP4",
        "",
    ),
    "Qwen/Qwen3-32B-FP8": (
        {
            "architecture": "Qwen3ForCausalLM",
            "quantization": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "attention": fp8,
            "mlp": fp8,
        },
        SERVED,
        SERVED,
    ),
    "RedHatAI/Qwen3-32B-FP8-dynamic": (
        {
            "architecture": "Qwen3ForCausalLM",
            "quantization": compressed(
                format="float-quantized",
                group={"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8}},
            ),
            "attention": fp8,
            "mlp": fp8,
        },
        SERVED,
        SERVED,
    ),
    "RedHatAI/Qwen3-32B-quantized.w4a16": (
        {
            "architecture": "Qwen3ForCausalLM",
            "quantization": compressed(
                format="pack-quantized",
                group={"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}},
            ),
        },
        "int weights of 4 bits): our kernels compute NVFP4",
        "",
    ),
    "Qwen/Qwen3-32B-AWQ": (
        {"architecture": "Qwen3ForCausalLM", "quantization": {"quant_method": "awq", "bits": 4}},
        "awq (AWQ, 4-bit integers with zero points): our kernels compute NVFP4",
        "",
    ),
    "by ModelOpt, NVFP4 cache": (
        {
            "architecture": "Qwen3ForCausalLM",
            "quantization": MODELOPT | {"kv_cache_scheme": "NVFP4"},
            "attention": modelopt_linear,
            "mlp": modelopt_linear,
        },
        SERVED,
        SERVED,
    ),
    "by ModelOpt, SVDQuant": (
        {"architecture": "Qwen3ForCausalLM", "quantization": MODELOPT | {"quant_algo": "NVFP4_SVD"}},
        "MIXED_PRECISION, got 'NVFP4_SVD'",
        "",
    ),
    "by ModelOpt, SVDQuant that only its tensors tell": (
        {
            "architecture": "Qwen3ForCausalLM",
            "quantization": MODELOPT,
            "attention": modelopt_linear,
            "mlp": modelopt_linear,
            "extra": {"model.layers.0.mlp.up_proj.weight_quantizer.svdquant_lora_a": ("BF16", [64], b"\0" * 128)},
        },
        "low-rank parts (SVDQuant) in 1 tensors",
        "",
    ),
    "by ModelOpt, W4A8": (
        {"architecture": "Qwen3ForCausalLM", "quantization": MODELOPT | {"quant_algo": "W4A8_NVFP4_FP8"}},
        "got 'W4A8_NVFP4_FP8'",
        "",
    ),
    "by llm-compressor, targets as a regex": (
        {
            "architecture": "Qwen3ForCausalLM",
            "quantization": compressed(group={"targets": ["re:.*mlp.*_proj$"]}),
            "attention": half,
        },
        SERVED,
        SERVED,
    ),
    "by llm-compressor, ignore=[]": (
        {
            "architecture": "Qwen3ForCausalLM",
            "quantization": compressed(ignore=[]),
            "head": compressed_tensors_linear,
        },
        "lm_head: expected 16-bit weights, got NVFP4 in lm_head: the engine keeps a head in 16 bits unless config.json",
        "",
    ),
    "by llm-compressor, ignore=[], with a head of its own": (
        {
            "architecture": "Qwen3ForCausalLM",
            "quantization": compressed(ignore=[]),
            "head": compressed_tensors_linear,
            "config": {"tie_word_embeddings": False},
        },
        SERVED,
        SERVED,
    ),
    "a quantized head in a model that keeps it in 16 bits": (
        {
            "architecture": "Qwen3NextForCausalLM",
            "quantization": compressed(ignore=[]),
            "head": compressed_tensors_linear,
            "config": {"tie_word_embeddings": False},
        },
        "lm_head: expected 16-bit weights, got NVFP4 in lm_head: the engine keeps the head of Qwen3NextForCausalLM",
        "",
    ),
    "by llm-compressor, from AutoModelForCausalLM": (
        {"architecture": "Qwen3_5ForCausalLM", "quantization": COMPRESSED_TENSORS},
        None,
        "",
    ),
    "by llm-compressor, Mixtral": (
        {
            "architecture": "MixtralForCausalLM",
            "quantization": compressed(ignore=["lm_head", "re:.*gate$"]),
            "more": experts(
                GATED,
                compressed_tensors_linear,
                "block_sparse_moe.experts",
            ),
            "config": {"num_local_experts": 2, "num_experts_per_tok": 1},
        },
        "experts named w1, w2, w3, as vLLM's MixtralForCausalLM reads them, got gate_proj",
        "",
    ),
    "a model that embeds": (
        {"architecture": "BertModel", "quantization": None, "attention": half, "mlp": half},
        "BertModel, a model that gives embeddings or scores, and no text",
        "",
    ),
    "a draft": (
        {"architecture": "EagleLlamaForCausalLM", "quantization": None, "attention": half, "mlp": half},
        "drafts for another",
        "",
    ),
    "one that vLLM has dropped": (
        {"architecture": "MllamaForConditionalGeneration", "quantization": None, "attention": half, "mlp": half},
        "which vLLM had until 0.10.2",
        "",
    ),
    "16 bits": (
        {"architecture": "LlamaForCausalLM", "quantization": None, "attention": half, "mlp": half},
        SERVED,
        SERVED,
    ),
}


def refusals(model: Path, device: Any, **flags: Any) -> list[str]:
    return [str(finding) for finding in examine(model, Target(device, **flags)).refusals]


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_served_or_refused_for_its_reason(tmp_path: Path, name: str) -> None:
    arguments, on_volta, on_cpu = SHAPES[name]
    model = write(tmp_path / "model", **arguments)
    for device, expected in (("volta", on_volta), ("cpu", on_volta if on_cpu == "" else on_cpu)):
        found = refusals(model, device)
        if expected is None:
            assert found == []
            continue
        assert found, device
        assert expected in found[0], found[0]
        assert not any(word in found[0] for word in ("LinearLayout(", "{'", "['", "None"))


def test_own_code_overrides_and_another_tokenizer_are_asked_for_by_flags(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "OwnForCausalLM", COMPRESSED_TENSORS)
    assert refusals(model, "volta")
    assert refusals(model, "volta", own_code=True) == []
    assert refusals(model, "volta", architectures=("LlamaForCausalLM",)) == []
    (model / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert "tokenizer.json" in refusals(model, "volta", own_code=True)[0]
    assert refusals(model, "volta", own_code=True, tokenizer=tmp_path) == []
    assert refusals(model, "volta", own_code=True, no_tokenizer=True) == []


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "", "tokenizer.json: expected a tokenizer, got an empty file"),
        ("tokenizer.json", "{", "tokenizer.json: expected a JSON object"),
        ("tokenizer.json", "{}", "tokenizer.json: model: expected an object, got nothing"),
        ("tokenizer.json", '{"model": {"vocab": {}}}', "tokenizer.json: model: vocab: expected tokens, got {}"),
        ("generation_config.json", "{,", "generation_config.json: expected a JSON object"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object, got a list"),
        ("config.json", '{"architectures": []}', "architectures: expected the name of the model's class in a list"),
        ("config.json", '{"architectures": {"a": 1}}', 'got {"a": 1}'),
    ],
)
def test_a_small_file_that_the_engine_cannot_read_is_refused(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    model = write(tmp_path / "model", "LlamaForCausalLM", COMPRESSED_TENSORS)
    (model / name).write_text(content)
    assert any(says in refusal for refusal in refusals(model, "cpu")), refusals(model, "cpu")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("pytorch_model.bin", "got pytorch_model.bin. Choose a version of the model in safetensors"),
        ("model.gguf", "got model.gguf. Make a model directory of it with `voltserve convert"),
    ],
)
def test_weights_in_other_files_are_refused_with_what_to_do(tmp_path: Path, file: str, says: str) -> None:
    model = write(tmp_path / "model", "LlamaForCausalLM", COMPRESSED_TENSORS)
    (model / "model.safetensors").rename(model / file)
    assert any(says in refusal for refusal in refusals(model, "volta")), refusals(model, "volta")


@pytest.mark.parametrize("indexed", [False, True])
def test_consolidated_files_beside_shards_are_one_warning(tmp_path: Path, indexed: bool) -> None:
    model = write(tmp_path / "model", "LlamaForCausalLM", COMPRESSED_TENSORS)
    names = examine(model, Target("volta")).tensors
    for number in (1, 2):
        (model / f"consolidated-{number}.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    if indexed:
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        write_json(model / "model.safetensors.index.json", index)
    seen = examine(model, Target("volta"))
    assert seen.tensors.keys() == names.keys()
    (only,) = (finding for finding in seen.findings if finding.severity != "info")
    assert (only.severity, only.check) == ("warning", "extra-shard")
    assert "consolidated-1.safetensors, consolidated-2.safetensors" in only.got


def test_a_token_beyond_the_embedding_is_a_warning(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "LlamaForCausalLM", COMPRESSED_TENSORS)
    tokenizer = read_json(model / "tokenizer.json")
    tokenizer["model"]["vocab"]["z"] = 99
    write_json(model / "tokenizer.json", tokenizer)
    found = [str(one) for one in examine(model, Target("volta")).findings if one.severity == "warning"]
    assert any("tokens below 32, config.json's vocab_size, got token 99" in one for one in found), found
