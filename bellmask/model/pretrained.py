"""A Hugging Face causal LM as a denoiser (Sec. 5.3, the recipe of Gong et al.), also with LoRA.

Its output at position i - 1 predicts token i, as in its own training, so position 0 is always
visible and never predicted. Attention is causal (``is_causal``, an ARM), full, or whatever mask the
caller gives: an annealed one in training, one that hides padding. The mask has a separate embedding
row and no logit; neither does a pad that was added to the tokenizer.

B batch, L length, D width, V predicted tokens, N selected rows (flat indices into B * L).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bellmask.model.dit import LocalConv, same_document
from bellmask.model.head import predict
from bellmask.utils.errors import UserError
from bellmask.utils.libraries import first_line, import_transformers, quiet

PROBE_LENGTH = 8
SAME = 1e-3
"""Relative tolerance between equivalent ways to compute logits."""
LOUD = 1000.0
"""Scale of logits to detect whether anything caps them after the head."""


@dataclass(frozen=True)
class Backbone:
    """A causal LM as the network of a run, apart from its weights."""

    language_model: dict[str, Any]
    """Its Hugging Face config."""
    chat_template: str | None = None
    """How its tokenizer writes conversations, where it says so."""


# Paper: App. C.1: continual pretraining
class PretrainedDenoiser(nn.Module):
    """Called as :class:`bellmask.model.transformer.Denoiser` is; rows name the tokens predicted."""

    first_maskable = 1
    """Position 0 has nothing before it that could predict it."""
    uses_time = False
    time_embedding = None
    loss_kernel = "torch"
    reads_chunks = True
    uses_flex_attention = False
    """Its blocks are those of transformers."""

    def __init__(
        self, language_model: Any, mask_id: int, *, is_causal: bool = False, local_conv: int = 0
    ) -> None:
        """``language_model`` is a ``AutoModelForCausalLM`` whose rows are our ids 0 .. V-1."""
        super().__init__()
        self.language_model, self.mask_id, self.is_causal = language_model, mask_id, is_causal
        # layers with sliding windows get full attention only with an explicit mask
        config = language_model.config
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        self.has_windows = window is not None if kinds is None else "sliding_attention" in kinds
        self.has_layer_norm = any(isinstance(m, nn.LayerNorm) for m in language_model.modules())
        self.mask_row = nn.Parameter(mean_row(language_model.get_input_embeddings()))
        self.local_conv = LocalConv(len(self.mask_row), local_conv) if local_conv else None

    @property
    def num_logits(self) -> int:
        """Tokens that can be predicted."""
        return int(self.language_model.get_output_embeddings().weight.shape[0])

    def block_modules(self) -> list[nn.Module]:
        """The transformer blocks, as the library itself names them."""
        names = set(self.language_model._no_split_modules or [])
        return [part for part in self.language_model.modules() if type(part).__name__ in names]

    def forward(
        self,
        x_BL: Tensor,
        rows_N: Tensor,
        targets_N: Tensor | Callable[[Tensor], Tensor] | None = None,
        *,
        weight_N: Tensor | None = None,
        t_B: Tensor | None = None,
        mask: Tensor | None = None,
        reduce: bool = True,
    ) -> Tensor:
        """Logits or cross-entropies of the rows: see :func:`bellmask.model.head.predict`."""
        h_BLD = self.hidden(x_BL, mask=mask)
        h_ND = h_BLD.flatten(0, 1).index_select(0, rows_N - 1)  # token i is predicted at i - 1
        head = self.language_model.get_output_embeddings()
        bias = head.bias if head.bias is not None else h_ND.new_zeros(len(head.weight))
        kernel = self.loss_kernel
        return predict(h_ND, head.weight, bias, targets_N, weight_N, reduce=reduce, kernel=kernel)

    def hidden(self, x_BL: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Final hidden states [B, L, D].

        ``mask`` [B or 1, 1, 1 or L, L] is True where seen; or it is [B, L], the documents of tokens
        that see only their own.
        """
        if mask is not None and mask.ndim == 2:
            mask = same_document(mask)
        if mask is None and self.has_windows and not self.is_causal:
            mask = torch.ones(1, 1, 1, x_BL.shape[1], dtype=torch.bool, device=x_BL.device)
        rows = self.language_model.get_input_embeddings()
        known_BL = torch.where(x_BL < rows.num_embeddings, x_BL, 0)  # pads added to the tokenizer
        h_BLD = rows(known_BL)
        # the sum over blocks is in float32, also where weights were gathered shorter; but for a
        # LayerNorm on a CPU, whose autocast does not lift it as a GPU's does
        device, is_stuck = h_BLD.device.type, self.has_layer_norm and h_BLD.device.type == "cpu"
        if torch.is_autocast_enabled(device) and not is_stuck:
            h_BLD = h_BLD.float()
        is_mask_BL = (x_BL == self.mask_id)[..., None]
        h_BLD = torch.where(is_mask_BL, self.mask_row.to(h_BLD.dtype), h_BLD)
        if self.local_conv is not None:
            h_BLD = self.local_conv(h_BLD, mask)
        return self.language_model.base_model(
            inputs_embeds=h_BLD, use_cache=False, **attention(mask, self.is_causal)
        ).last_hidden_state


@torch.no_grad()
def mean_row(embedding: Any) -> Tensor:
    """The mean of all tokens as the model sees them (some architectures scale their rows)."""
    return embedding(torch.arange(len(embedding.weight), device=embedding.weight.device)).mean(0)


def attention(mask: Tensor | None, is_causal: bool) -> dict[str, Any]:
    """Arguments that make a causal LM attend so: its own way, everywhere, or by a mask.

    At full attention no L x L mask exists.
    """
    if is_causal:
        if mask is None:
            return {}
        length = mask.shape[-1]
        past = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        return {"attention_mask": mask & past}
    return {"is_causal": False} if mask is None else {"attention_mask": mask}


def dropout_rates(config: Mapping[str, Any]) -> list[str]:
    """Names of the dropout rates of a Hugging Face config that are above 0."""
    return [
        name
        for name, value in config.items()
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float) and value > 0
    ]


def make_language_model(config: Mapping[str, Any], dropout: float) -> Any:
    """A causal LM of this Hugging Face config with random weights; probed where it has numbers.

    ``dropout`` replaces those rates of the config that are above 0.
    """
    transformers = import_transformers("a pretrained backbone")
    values = {**config, **dict.fromkeys(dropout_rates(config), dropout)}
    kind = values.pop("model_type", None)
    with quiet(f"{kind} cannot become a masked model"):
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **values),
            attn_implementation="sdpa",
            dtype=torch.float32,
            trust_remote_code=False,
        )
    if not next(made.parameters()).is_meta:  # the planner's have shapes only
        probe(made, str(kind))
    return made


@torch.no_grad()
def probe(language_model: Any, name: str) -> None:
    """UserError unless attention can be made bidirectional, which is tested, not looked up."""
    implementation = getattr(language_model.config, "_attn_implementation", None)
    if implementation != "sdpa":
        raise UserError(f"{name}: attention is {implementation}, and only sdpa takes masks")
    was_training = language_model.training
    language_model.eval()
    count = language_model.get_input_embeddings().num_embeddings
    if count < 1:
        raise UserError(f"{name} has no tokens")
    device = next(language_model.parameters()).device
    row = (torch.arange(PROBE_LENGTH, device=device) * 7 + 1) % count
    other = row.clone()
    other[-1] = (other[-1] + 1) % count
    pair = torch.stack([row, other])
    everywhere = torch.ones(1, 1, PROBE_LENGTH, PROBE_LENGTH, dtype=torch.bool, device=device)

    def states(**how: Any) -> Tensor:
        return language_model.base_model(input_ids=pair, use_cache=False, **how).last_hidden_state

    try:
        causal, by_mask = states(), states(attention_mask=everywhere.tril())
        opened = PretrainedDenoiser(language_model, count).hidden(pair)
        opened_by_mask = states(attention_mask=everywhere)
        head = language_model.get_output_embeddings()
        plain = LOUD * head(causal)
        hook = head.register_forward_hook(lambda _, __, quiet: LOUD * quiet)
        logits = language_model(input_ids=pair).logits
        hook.remove()
    except Exception as error:  # each architecture fails differently
        raise UserError(f"{name} cannot become a masked model: {first_line(error)}") from None
    finally:
        language_model.train(was_training)
    problems = {
        "causal attention sees later tokens": _sees_later(causal) or _sees_later(by_mask),
        "full attention stays causal": not (_sees_later(opened) and _sees_later(opened_by_mask)),
        "full attention and a mask that hides nothing differ": _differ(opened, opened_by_mask),
        "a causal mask does not give causal attention": _differ(causal, by_mask),
        "its logits are not a linear map of its hidden states": _differ(logits, plain),
    }
    for problem, is_there in problems.items():
        if is_there:
            kind = getattr(language_model.config, "model_type", "this architecture")
            raise UserError(f"{name} ({kind}) cannot become a masked model: {problem}")


def _sees_later(states_2LD: Tensor) -> bool:
    """The first position of two rows that differ in their last token."""
    return not torch.equal(states_2LD[0, 0], states_2LD[1, 0])


def _differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > SAME * b.abs().max().clamp(min=1e-6))


# Low-rank updates of a pretrained backbone (LoRA), by peft; needs the extra ``lora``.


def add_lora(model: PretrainedDenoiser, rank: int, alpha: float) -> None:
    """Freeze the language model and add updates of ``rank`` to its linear layers, in place.

    The head is not changed; the mask's row stays trainable, because it is new.
    """
    try:
        import peft
    except ImportError:
        raise UserError("--start.lora-rank needs peft: pip install 'bellmask[lora]'") from None
    inner = model.language_model
    head = inner.get_output_embeddings()
    linear = {  # last names of the linear maps inside blocks (GPT-2 calls them Conv1D)
        name.rsplit(".", 1)[-1]
        for name, part in inner.named_modules()
        if part is not head and (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D")
    }
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]
        lora_dropout=0.0,
        target_modules=sorted(linear),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Conv1D of GPT-2: it corrects the setting itself
        peft.inject_adapter_in_model(config, inner)


@torch.no_grad()
def merge_lora(model: PretrainedDenoiser) -> None:
    """Add the updates to the weights and take the adapters away, in place."""
    if not any("lora_" in name for name, _ in model.language_model.named_parameters()):
        return
    from peft.tuners.lora import LoraLayer

    for name, part in list(model.language_model.named_modules()):
        if isinstance(part, LoraLayer):
            part.merge()
            above, _, last = name.rpartition(".")
            setattr(model.language_model.get_submodule(above), last, part.get_base_layer())
    for parameter in model.language_model.parameters():
        parameter.requires_grad_(True)
