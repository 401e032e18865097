"""What a decoder is, once its family's configuration has been read: every number the forward pass needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, Protocol, get_args

Activation = Literal["silu", "gelu", "gelu_tanh"]
QKNorm = Literal["none", "head", "projection"]
NormPlacement = Literal["pre", "post", "both"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


class KVSpec(NamedTuple):
    """Geometry of one layer's cache."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int


class ModelConfig(Protocol):
    """What an engine needs to know of any model, whoever defines it.

    ``max_position_embeddings`` is the longest sequence the model can be served with.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def kv_specs(self) -> list[KVSpec]: ...


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding; the formulas are in ``rope``.

    ``max_positions`` is the length up to which dynamic scaling changes nothing;
    ``original_max_positions`` the length of the pretraining that yarn and llama3 refer to;
    ``attention_factor`` multiplies cos and sin; ``frequency_factors`` divide the frequencies (longrope).
    """

    kind: RopeKind
    theta: float
    rotary_dim: int
    factor: float = 1.0
    max_positions: int = 0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class DecoderConfig:
    """One causal language model.

    ``ropes`` are the distinct rotary embeddings and ``layer_ropes`` each layer's index into them;
    ``sliding_windows`` is each layer's window in tokens, None: all. ``norm_placement``: before the
    blocks (Llama), after them (OLMo 2) or both (Gemma). ``qk_norm`` spans one head or the whole
    projection. ``max_position_embeddings`` is the longest sequence the model can be served with.
    ``notes`` tell the operator what was decided on the way.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    attention_scale: float
    ropes: tuple[RopeSpec, ...]
    layer_ropes: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]
    activation: Activation = "silu"
    norm_placement: NormPlacement = "pre"
    norm_plus_one: bool = False
    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    fused_checkpoint: bool = False
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def kv_specs(self) -> list[KVSpec]:
        """Cache geometry of every layer, in order."""
        return [KVSpec(self.num_kv_heads, self.head_dim, self.head_dim)] * self.num_layers


@dataclass(frozen=True)
class DecoderShape:
    """A decoder's dimensions, and its switches as numbers (places in the types above): what a kernel made
    for one model may take for granted. Equal shapes compute alike but for rope, scales and windows, which
    every call brings along."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    activation: int
    norm_placement: int
    qk_norm: int
    qkv_bias: int
    out_bias: int
    mlp_bias: int

    @classmethod
    def of(cls, config: DecoderConfig) -> DecoderShape:
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.ropes[0].rotary_dim,
            activation=get_args(Activation).index(config.activation),
            norm_placement=get_args(NormPlacement).index(config.norm_placement),
            qk_norm=get_args(QKNorm).index(config.qk_norm),
            qkv_bias=int(config.qkv_bias),
            out_bias=int(config.out_bias),
            mlp_bias=int(config.mlp_bias),
        )

    def as_dict(self) -> dict[str, int]:
        """As a pack's conditions hold it."""
        return asdict(self)
