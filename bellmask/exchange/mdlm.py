"""The published layout of mdlm and duo, and the map between it and our parameters, both ways.

Their network is our backbone with other names: RoPE of base 10 000 by halves, queries, keys and
values packed as (three, heads, size), layer norms with weight only. What differs:

- AdaLN is always there. A model without time input is fed sigma = 0, so its AdaLN gives constants,
  which are our modulation vectors. Back, the constants become AdaLN's bias and all weights of the
  time's way are zero: the same function, though not the numbers that were trained.
- The mask has a row in the embedding where the tokenizer has it, and one in the head, whose logit
  nobody reads: ours has none.
- A pad that only our tokenizer has gets a row whose probability is exactly zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bellmask.model.transformer import CONDITION_WIDTH, NUM_SINUSOIDS
from bellmask.storage.loading import IdMap
from bellmask.utils.errors import UserError

Tensors = Mapping[str, Tensor]

NEVER = -1e6
"""The logit of what must not be predicted (mdlm's own minus infinity): exp of it is zero."""

_BLOCK = {
    "norm1.weight": "attention_norm.weight",
    "attn_qkv.weight": "qkv.weight",
    "attn_out.weight": "attention_out.weight",
    "norm2.weight": "mlp_norm.weight",
    "mlp.0.weight": "mlp_in.weight",
    "mlp.0.bias": "mlp_in.bias",
    "mlp.2.weight": "mlp_out.weight",
    "mlp.2.bias": "mlp_out.bias",
}
_TIME = {
    "sigma_map.mlp.0.weight": "time_embedding.into.weight",
    "sigma_map.mlp.0.bias": "time_embedding.into.bias",
    "sigma_map.mlp.2.weight": "time_embedding.out.weight",
    "sigma_map.mlp.2.bias": "time_embedding.out.bias",
}
_EMBEDDING, _HEAD = "vocab_embed.embedding", "output_layer.linear"


@dataclass(frozen=True)
class Shape:
    """The sizes of one of their networks."""

    num_layers: int
    width: int
    mlp_width: int
    condition: int
    """Width of the time's embedding."""
    vocabulary: int
    """Rows of the embedding, the mask's included."""

    def layout(self) -> dict[str, tuple[int, ...]]:
        """Every parameter and its shape, in the order in which their module registers them."""
        width, hidden, condition = self.width, self.mlp_width, self.condition
        shapes: dict[str, tuple[int, ...]] = {
            _EMBEDDING: (self.vocabulary, width),
            "sigma_map.mlp.0.weight": (condition, NUM_SINUSOIDS),
            "sigma_map.mlp.0.bias": (condition,),
            "sigma_map.mlp.2.weight": (condition, condition),
            "sigma_map.mlp.2.bias": (condition,),
        }
        for number in range(self.num_layers):
            block: dict[str, tuple[int, ...]] = {
                "norm1.weight": (width,),
                "attn_qkv.weight": (3 * width, width),
                "attn_out.weight": (width, width),
                "norm2.weight": (width,),
                "mlp.0.weight": (hidden, width),
                "mlp.0.bias": (hidden,),
                "mlp.2.weight": (width, hidden),
                "mlp.2.bias": (width,),
                "adaLN_modulation.weight": (6 * width, condition),
                "adaLN_modulation.bias": (6 * width,),
            }
            shapes |= {f"blocks.{number}.{name}": shape for name, shape in block.items()}
        return shapes | {
            "output_layer.norm_final.weight": (width,),
            f"{_HEAD}.weight": (self.vocabulary, width),
            f"{_HEAD}.bias": (self.vocabulary,),
            "output_layer.adaLN_modulation.weight": (2 * width, condition),
            "output_layer.adaLN_modulation.bias": (2 * width,),
        }


def plain_names(stored: Tensors) -> dict[str, Tensor]:
    """Without what Lightning, torch.compile and DDP put before the names."""
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        plain = name.replace("_orig_mod.", "").removeprefix("module.").removeprefix("backbone.")
        if plain in found:
            raise UserError(f"the checkpoint holds {plain} twice, once as {name}")
        found[plain] = tensor
    return found


def drop_rotary(weights: Tensors) -> tuple[dict[str, Tensor], int | None]:
    """The weights without RoPE's buffers, and the size of a head if a buffer tells it."""
    head_size = None
    kept = {}
    for name, tensor in weights.items():
        if "rotary_emb." not in name:
            kept[name] = tensor
        elif name.endswith("inv_freq"):
            head_size = 2 * tensor.numel()
    return kept, head_size


def find_shape(weights: Tensors) -> Shape:
    """The sizes, checked against every tensor; one error lists all that does not fit."""
    needed = (_EMBEDDING, "sigma_map.mlp.0.weight", "blocks.0.mlp.0.weight")
    absent = [name for name in needed if name not in weights or weights[name].ndim != 2]
    if absent:
        held = ", ".join(sorted(weights)[:8]) or "nothing"
        raise UserError(
            f"this is not a checkpoint in mdlm's layout: no matrix {', '.join(absent)} among its "
            f"{len(weights)} tensors (it begins with {held}). Their autoregressive models have no "
            "sigma_map; they are not masked diffusion and cannot be imported"
        )
    numbers = [int(m[1]) for m in map(re.compile(r"blocks\.([0-9]{1,6})\.").match, weights) if m]
    vocabulary, width = weights[_EMBEDDING].shape
    shape = Shape(
        num_layers=min(max(numbers) + 1, len(weights)),  # a missing one is named, not a million
        width=width,
        mlp_width=len(weights["blocks.0.mlp.0.weight"]),
        condition=len(weights["sigma_map.mlp.0.weight"]),
        vocabulary=vocabulary,
    )
    check_layout(weights, shape)
    return shape


def check_layout(weights: Tensors, shape: Shape) -> None:
    """Refuse weights with missing, extra or misshapen tensors, naming all of them."""
    wanted = shape.layout()
    problems = []
    for name, size in wanted.items():
        if name not in weights:
            problems.append(f"  missing: {name} {list(size)}")
        elif tuple(weights[name].shape) != size:
            problems.append(f"  {name} is {list(weights[name].shape)}, not {list(size)}")
    problems += [f"  not known: {name}" for name in weights if name not in wanted]
    if problems:
        raise UserError(
            f"{len(problems)} tensors do not fit mdlm's layout of {shape.num_layers} blocks of "
            f"width {shape.width}; nothing was imported:\n" + "\n".join(problems)
        )


def to_ours(weights: Tensors, shape: Shape, ids: IdMap, *, has_time: bool) -> dict[str, Tensor]:
    """Our parameters, float32; with ``has_time`` AdaLN stays, else it is folded into constants."""
    if has_time and shape.condition != CONDITION_WIDTH:
        raise UserError(
            f"the time's embedding is {shape.condition} wide, and only {CONDITION_WIDTH} can keep "
            "its time input; without it any width can be imported"
        )
    theirs = {name: tensor.detach().float() for name, tensor in weights.items()}
    found = {ours: theirs[name] for name, ours in _renamed(shape.num_layers).items()}
    if has_time:
        found |= {ours: theirs[name] for name, ours in _TIME.items()}
    condition = constant_condition(theirs)
    for name, ours in _modulations(shape.num_layers).items():
        linear = {part: theirs[f"{name}.{part}"] for part in ("weight", "bias")}
        if has_time:
            found |= {f"{ours}.linear.{part}": tensor for part, tensor in linear.items()}
        else:
            folded = linear["weight"].double() @ condition + linear["bias"].double()
            found[f"{ours}.vectors"] = folded.float().view(-1, shape.width)
    return found | _rows_to_ours(theirs, ids)


def from_ours(tensors: Tensors, num_layers: int, ids: IdMap) -> dict[str, Tensor]:
    """Their parameters, float32: what :func:`to_ours` makes ours of again, exactly."""
    ours = {name: tensor.detach().float() for name, tensor in tensors.items()}
    width, mlp_width = ours["final_norm.weight"].numel(), ours["blocks.0.mlp_in.bias"].numel()
    shape = Shape(num_layers, width, mlp_width, CONDITION_WIDTH, ids.size)
    found = {name: torch.zeros(size) for name, size in shape.layout().items()}
    found |= {name: ours[mine] for name, mine in _renamed(num_layers).items()}
    found |= {name: ours[mine] for name, mine in _TIME.items() if mine in ours}
    for name, mine in _modulations(num_layers).items():
        if f"{mine}.vectors" in ours:  # constants: a bias behind weights of zero
            found[f"{name}.bias"] = ours[f"{mine}.vectors"].flatten()
        else:
            found |= {
                f"{name}.{part}": ours[f"{mine}.linear.{part}"] for part in ("weight", "bias")
            }
    return found | _rows_from_ours(ours, ids)


def constant_condition(theirs: Tensors) -> Tensor:
    """What AdaLN is fed at sigma = 0, float64: cosines of 0, sines of 0, two layers, SiLU."""
    waves = torch.cat([torch.ones(NUM_SINUSOIDS // 2), torch.zeros(NUM_SINUSOIDS // 2)]).double()
    layers = [
        (theirs[f"sigma_map.mlp.{n}.weight"].double(), theirs[f"sigma_map.mlp.{n}.bias"].double())
        for n in (0, 2)
    ]
    for weight, bias in layers:
        waves = F.silu(weight @ waves + bias)
    return waves


def _renamed(num_layers: int) -> dict[str, str]:
    """Their names and ours of what needs no change."""
    blocks = {
        f"blocks.{number}.{theirs}": f"blocks.{number}.{ours}"
        for number in range(num_layers)
        for theirs, ours in _BLOCK.items()
    }
    return blocks | {"output_layer.norm_final.weight": "final_norm.weight"}


def _modulations(num_layers: int) -> dict[str, str]:
    blocks = {f"blocks.{n}.adaLN_modulation": f"blocks.{n}.modulation" for n in range(num_layers)}
    return blocks | {"output_layer.adaLN_modulation": "final_modulation"}


def _rows_to_ours(theirs: Tensors, ids: IdMap) -> dict[str, Tensor]:
    embedding, weight = theirs[_EMBEDDING], theirs[f"{_HEAD}.weight"]
    num_tokens, width = len(ids.tokens_V), embedding.shape[1]
    found = {
        "embedding.weight": torch.zeros(num_tokens + 1, width),
        "head.weight": torch.zeros(num_tokens, width),
        "head.bias": torch.full((num_tokens,), NEVER),
    }
    found["embedding.weight"][ids.ours] = embedding[ids.theirs]
    found["embedding.weight"][num_tokens] = embedding[ids.mask]
    found["head.weight"][ids.ours] = weight[ids.theirs]
    found["head.bias"][ids.ours] = theirs[f"{_HEAD}.bias"][ids.theirs]
    return found


def _rows_from_ours(ours: Tensors, ids: IdMap) -> dict[str, Tensor]:
    width = ours["head.weight"].shape[1]
    found = {
        _EMBEDDING: torch.zeros(ids.size, width),
        f"{_HEAD}.weight": torch.zeros(ids.size, width),
        f"{_HEAD}.bias": torch.full((ids.size,), NEVER),
    }
    found[_EMBEDDING][ids.theirs] = ours["embedding.weight"][ids.ours]
    found[_EMBEDDING][ids.mask] = ours["embedding.weight"][-1]
    found[f"{_HEAD}.weight"][ids.theirs] = ours["head.weight"][ids.ours]
    found[f"{_HEAD}.bias"][ids.theirs] = ours["head.bias"][ids.ours]
    return found
