"""The shapes of published models, and the part of a model that fits into a number of bytes.

Shapes and names are those of the models on the Hugging Face hub. A large model is cut to one rank's part of a job: some
layers (pipeline parallel), some experts (expert parallel), and one part of each tensor's first dimension, as FSDP2
shards it. So the number of tensors, their names and the mix of large and small tensors match a real rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]
Shapes = Callable[[range, range], Iterator[tuple[str, Shape]]]
"""Returns names and shapes of the parameters in some layers and experts. Parameters outside the layers come with the
first and the last layer."""

ADAM_BYTES = 2 + 3 * 4
"""Bytes for each parameter: bf16, and in fp32 the master copy and two moments."""


def gpt2(layers: range, experts: range) -> Iterator[tuple[str, Shape]]:
    """GPT-2 124M. Its output layer is its embedding."""
    width, total = 768, ARCHITECTURES["gpt2"].layers
    if layers.start == 0:
        yield "transformer.wte.weight", (50257, width)
        yield "transformer.wpe.weight", (1024, width)
    for layer in layers:
        name = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            yield f"{name}.{norm}.weight", (width,)
            yield f"{name}.{norm}.bias", (width,)
        for part, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            yield f"{name}.{part}.weight", (rows, columns)
            yield f"{name}.{part}.bias", (columns,)
    if layers.stop == total:
        yield "transformer.ln_f.weight", (width,)
        yield "transformer.ln_f.bias", (width,)


def _ends(layers: range, total: int, vocabulary: int, width: int) -> Iterator[tuple[str, Shape]]:
    if layers.start == 0:
        yield "model.embed_tokens.weight", (vocabulary, width)
    if layers.stop == total:
        yield "model.norm.weight", (width,)
        yield "lm_head.weight", (vocabulary, width)


def _mlp(name: str, inner: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.gate_proj.weight", (inner, width)
    yield f"{name}.up_proj.weight", (inner, width)
    yield f"{name}.down_proj.weight", (width, inner)


def llama3_8b(layers: range, experts: range) -> Iterator[tuple[str, Shape]]:
    """Llama-3 8B."""
    width = 4096
    yield from _ends(layers, ARCHITECTURES["llama3-8b"].layers, 128256, width)
    for layer in layers:
        name = f"model.layers.{layer}"
        for part, rows in (("q_proj", width), ("k_proj", 1024), ("v_proj", 1024), ("o_proj", width)):
            yield f"{name}.self_attn.{part}.weight", (rows, width)
        yield from _mlp(f"{name}.mlp", 14336, width)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", (width,)


def olmoe(layers: range, experts: range) -> Iterator[tuple[str, Shape]]:
    """OLMoE 1B-7B: 64 small experts in each of 16 layers."""
    width = 2048
    yield from _ends(layers, ARCHITECTURES["olmoe"].layers, 50304, width)
    for layer in layers:
        name = f"model.layers.{layer}"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{name}.self_attn.{part}.weight", (width, width)
        for norm in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", (width,)
        yield f"{name}.mlp.gate.weight", (64, width)
        for expert in experts:
            yield from _mlp(f"{name}.mlp.experts.{expert}", 1024, width)


def deepseek_v3(layers: range, experts: range) -> Iterator[tuple[str, Shape]]:
    """DeepSeek-V3 without multi-token prediction: latent attention, 256 experts and a shared one in most layers."""
    width, heads = 7168, 128
    yield from _ends(layers, ARCHITECTURES["deepseek-v3"].layers, 129280, width)
    for layer in layers:
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_a_proj.weight", (1536, width)
        yield f"{name}.self_attn.q_a_layernorm.weight", (1536,)
        yield f"{name}.self_attn.q_b_proj.weight", (heads * (128 + 64), 1536)
        yield f"{name}.self_attn.kv_a_proj_with_mqa.weight", (512 + 64, width)
        yield f"{name}.self_attn.kv_a_layernorm.weight", (512,)
        yield f"{name}.self_attn.kv_b_proj.weight", (heads * (128 + 128), 512)
        yield f"{name}.self_attn.o_proj.weight", (width, heads * 128)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}.{norm}.weight", (width,)
        if layer < 3:
            yield from _mlp(f"{name}.mlp", 18432, width)
            continue
        yield f"{name}.mlp.gate.weight", (256, width)
        yield f"{name}.mlp.gate.e_score_correction_bias", (256,)
        for expert in experts:
            yield from _mlp(f"{name}.mlp.experts.{expert}", 2048, width)
        yield from _mlp(f"{name}.mlp.shared_experts", 2048, width)


@dataclass(frozen=True)
class Part:
    """The part of a model that one rank saves."""

    shapes: dict[str, Shape]
    description: str


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model, and how to cut the model if it does not fit."""

    title: str
    shapes: Shapes
    layers: int
    experts: int = 0
    fewer_layers: bool = False
    """Drop layers from the end until the model fits. Otherwise all ``stage`` layers stay and are sharded."""
    stage: range | None = None
    """The layers of one pipeline stage. None: all."""
    local_experts: int | None = None
    """The experts of one rank. None: all."""

    def fit(self, nbytes: int) -> Part:
        """Return the part with weights and optimizer of about ``nbytes``."""
        layers = self.stage or range(self.layers)
        experts = range(self.experts if self.local_experts is None else self.local_experts)
        shapes = dict(self.shapes(layers, experts))
        while self.fewer_layers and len(layers) > 1 and _nbytes(shapes) > nbytes:
            layers = layers[:-1]
            # Keep the last norm.
            shapes = dict(self.shapes(layers, experts)) | _last(self, experts)
        ranks = max(1, round(_nbytes(shapes) / nbytes))
        if ranks > 1:
            shapes = {name: (-(-shape[0] // ranks), *shape[1:]) for name, shape in shapes.items()}
        told = [self.title]
        if len(layers) < self.layers:
            told.append(f"{len(layers)} of {self.layers} layers")
        if len(experts) < self.experts:
            told.append(f"{len(experts)} of {self.experts} experts")
        if ranks > 1:
            told.append(f"one rank's shard of {ranks:,}")
        return Part(shapes, ", ".join(told))


def _last(architecture: Architecture, experts: range) -> dict[str, Shape]:
    """Return the parameters after the last layer."""
    return dict(architecture.shapes(range(architecture.layers, architecture.layers), experts))


def _nbytes(shapes: dict[str, Shape]) -> int:
    return sum(map(prod, shapes.values())) * ADAM_BYTES


ARCHITECTURES = {
    "gpt2": Architecture(title="GPT-2 124M", shapes=gpt2, layers=12, fewer_layers=True),
    "llama3-8b": Architecture(title="Llama-3 8B", shapes=llama3_8b, layers=32),
    "olmoe": Architecture(title="OLMoE 1B-7B", shapes=olmoe, layers=16, experts=64),
    "deepseek-v3": Architecture(
        title="DeepSeek-V3", shapes=deepseek_v3, layers=61, experts=256, stage=range(3, 7), local_experts=32
    ),
}
