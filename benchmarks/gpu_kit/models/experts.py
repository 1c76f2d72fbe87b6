"""The device's own time of a layer with experts, at decode and over a prompt, beside its roof.

Some layers, whose experts no cache holds, are captured in one CUDA graph; a figure is one layer's.
The roof reads the chosen experts, all other weights and the KV once, or computes. In the fast mode
the library's grouped GEMM is timed beside the kernels of this project, with the error between both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_kit.models.graph_step import MODES, ROWS, fill_kv
from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from torch import Tensor

    from shared.engine.executors.step_computer import StepComputer
    from shared.engine.layers.moe import MoeMlp
    from shared.engine.model_config.model_config import ModelConfig
    from shared.engine.step import StepInputs
    from shared.numerics import Mode

LAYERS, COMPILED_LAYERS = 4, 1
BATCHES, CONTEXT, PROMPT = (1, 64, 8, 256), 2048, 2048
FEW_BATCHES, SHORT = (1, 3), 48  # of a dry run
LEAST_S = 1.5  # a case with less time is left out
BF16_BYTES = 2
QWEN3: dict[str, Any] = {  # Qwen3-30B-A3B; nothing reads the vocabulary
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = {  # DeepSeek-V2-Lite's sizes, with the router of V3
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
MODELS = {"Qwen3-30B-A3B": QWEN3, "DeepSeek-V2-Lite": DEEPSEEK}
FEW = {"hidden_size": 256, "moe_intermediate_size": 64}
FEWER = {
    "Qwen3-30B-A3B": FEW | {"num_experts": 8, "num_attention_heads": 8, "num_key_value_heads": 1},
    "DeepSeek-V2-Lite": FEW | {"n_routed_experts": 8},
}
EXPERTS = ("route", "expert_rows")
KERNELS: dict[Mode, tuple[str, ...]] = {
    "exact": ("linear", "lane_linear", "grouped_linear", *EXPERTS, *ROWS),
    "fast": ("expert_mlp", *EXPERTS, *ROWS),
}


def run(session: Session) -> None:
    for name in MODELS:
        _model(session, name)


def _model(session: Session, name: str) -> None:
    from benchmarks.gpu_kit.models.dummy_model import make_executor

    batches, context, prompt = _sizes(session)
    layers = COMPILED_LAYERS if session.is_dry else LAYERS
    config = MODELS[name] | {"num_hidden_layers": layers}
    if session.mode == "dry":
        config |= FEWER[name]
    size = session.shapes.block_size
    num_blocks = max(max(batches) * -(-context // size), -(-prompt // size))
    sizes = {"num_blocks": num_blocks, "num_positions": max(context, prompt)}
    executor = make_executor(session, config, "exact", **sizes)
    fill_kv(session, executor)
    for case, step in _steps(session, batches, context, prompt):
        for mode in MODES:
            if session.left_s < LEAST_S:
                session.add(case=f"{name}, {case}", mode=mode, left_out="no time left")
            else:
                measure(session, executor, mode, f"{name}, {case}", step)


def _sizes(session: Session) -> tuple[Sequence[int], int, int]:
    """Returns the batches, the tokens of their contexts and those of a prompt."""
    if session.mode == "dry":
        return FEW_BATCHES, SHORT, SHORT
    return BATCHES, CONTEXT, PROMPT


def _steps(
    session: Session, batches: Sequence[int], context: int, prompt: int
) -> list[tuple[str, StepInputs]]:
    """The most informative first."""
    from benchmarks.gpu_kit.model_steps.inputs import decode_step, prefill_step

    size = session.shapes.block_size
    decodes = [(f"decode, batch {batch}", decode_step(batch, context, size)) for batch in batches]
    return [*decodes[:2], (f"prefill of {prompt}", prefill_step(0, prompt, size)), *decodes[2:]]


def measure(
    session: Session, executor: StepComputer, mode: Mode, case: str, step: StepInputs
) -> dict[str, Any]:
    """Adds the row of a layer, and returns it."""
    from benchmarks.gpu_kit.kernels.timed import at_ceilings
    from benchmarks.gpu_kit.model_steps.times import count_launches, device_time
    from shared.engine.executors.loading.model_loading import set_mode

    set_mode(executor.model, mode)
    num_layers = len(executor.model.layers)
    call = _layers_of(session, executor, step)
    launches = {name: num / num_layers for name, num in count_launches(call).items()}
    experts = _experts_used(session, executor, call, len(step.input_ids))
    times = device_time(session, call)
    seconds = times.pop("measured_s")
    num_bytes, flops = least_work(executor.model.config, step, experts)
    return session.add(
        case=case,
        mode=mode,
        experts=round(experts, 1),
        predicted_s=at_ceilings(session, num_bytes, flops),
        measured_s=None if seconds is None else seconds / num_layers,
        kernels=KERNELS[mode],
        **launches,
        **times,
        **(_library(session, executor, call) if mode == "fast" else {}),
    )


def _layers_of(session: Session, executor: StepComputer, step: StepInputs) -> Callable[[], Tensor]:
    """Returns the step's layers, of random hidden states: routers spread their tokens."""
    inputs = executor.device_inputs(step, samples_on_device=True)
    x = session.random(len(step.input_ids), executor.model.config.hidden_size)
    return partial(
        executor.model.run_layers, x, inputs.positions, executor.kv_slots(), inputs.attention
    )


def _mlps(executor: StepComputer) -> list[MoeMlp]:
    from shared.engine.layers.moe import MoeMlp

    return [each for each in executor.model.modules() if isinstance(each, MoeMlp)]


def _experts_used(
    session: Session, executor: StepComputer, call: Callable[[], object], num_tokens: int
) -> float:
    """Returns the experts of a layer that have tokens, in the mean; dry, what even routers give."""
    mlps = _mlps(executor)
    if session.is_dry:
        num, chosen = mlps[0].config.num_experts, mlps[0].config.experts_per_token
        return num * (1 - (1 - chosen / num) ** num_tokens)
    for mlp in mlps:
        mlp.summed_offsets.zero_()
    call()
    return sum(int((mlp.summed_offsets.diff() > 0).sum()) for mlp in mlps) / len(mlps)


def least_work(config: ModelConfig, step: StepInputs, experts: float) -> tuple[float, float]:
    """Returns the bytes that a layer must read, with the weights of so many experts, and its
    operations.
    """
    moe = config.layers[0].moe
    assert moe is not None
    num_tokens, hidden = len(step.input_ids), config.hidden_size
    dense = attention_weights(config) + moe.num_experts * hidden
    dense += 3 * moe.shared_intermediate_size * hidden
    expert = 3 * moe.intermediate_size * hidden
    read = int((step.context_lens - step.query_lens).sum())  # a prompt's own rows are written
    row = 2 * config.num_kv_heads * config.head_dim
    if config.latent is not None:
        row = config.latent.kv_rank + config.latent.rope_dim
    num_bytes = BF16_BYTES * (dense + experts * expert + read * row)
    flops = 2.0 * num_tokens * (dense + moe.experts_per_token * expert)
    pairs = float((step.query_lens * (step.context_lens - step.query_lens / 2)).sum())
    return num_bytes, flops + 2 * pairs * config.num_heads * _attended(config)


def attention_weights(config: ModelConfig) -> int:
    """Returns the elements of a layer's projections."""
    hidden, heads = config.hidden_size, config.num_heads
    if config.latent is None:
        return 2 * (heads + config.num_kv_heads) * config.head_dim * hidden
    latent = config.latent
    queries = heads * config.head_dim * hidden
    if latent.query_rank is not None:
        queries = latent.query_rank * (hidden + heads * config.head_dim)
    rows = (latent.kv_rank + latent.rope_dim) * hidden
    expansion = heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
    return queries + rows + expansion + heads * latent.value_dim * hidden


def _attended(config: ModelConfig) -> int:
    """Returns the elements of a key and a value, as the kernels multiply them."""
    if config.latent is None:
        return 2 * config.head_dim
    return 2 * config.latent.kv_rank + config.latent.rope_dim


def _library(
    session: Session, executor: StepComputer, call: Callable[[], Tensor]
) -> dict[str, Any]:
    """Returns the columns of the same layers by torch's grouped GEMM, if it can multiply."""
    from benchmarks.gpu_kit.model_steps.times import device_time
    from kernels.ops import NEVER, reason_against_grouped

    mlps = _mlps(executor)
    reason = reason_against_grouped(mlps[0].weights(), mlps[0].config.num_experts)
    if session.is_dry or reason:
        return {"library": reason or None}
    ours = call().float()
    try:
        for mlp in mlps:
            mlp.library_rows = 0
        error = float((call().float() - ours).pow(2).mean().sqrt() / ours.pow(2).mean().sqrt())
        seconds = device_time(session, call)["measured_s"] / len(mlps)
    except RuntimeError as raised:
        return {"library": str(raised).partition("\n")[0]}
    finally:
        for mlp in mlps:
            mlp.library_rows = NEVER
    return {"library_ms": round(seconds * 1e3, 4), "library_error": round(error, 5)}
