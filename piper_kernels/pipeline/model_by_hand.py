"""A decoder described by hand in a JSON file of our own: ``"model_type": "piper"``.

For models of papers and for what-if studies, where no Hugging Face class exists. Pure.
"""

from typing import Literal

from piper_kernels.config import RouterKind
from piper_kernels.errors import ConfigError, instruction, require
from piper_kernels.pipeline.attention_description import GroupedAttention
from piper_kernels.pipeline.model_description import (
    Dtype,
    Experts,
    FeedForward,
    Layer,
    ModelDescription,
    NormKind,
    SharedExperts,
)
from piper_kernels.strict_model import NonNegativeInt, PositiveInt, StrictModel


class HandModel(StrictModel):
    """The file's keys, as far as they exist with Hugging Face's names; unknown ones are refused.

    Attributes:
        model_type: ``"piper"``.
        source: where the numbers come from.
        vocab_size: 0 leaves embedding and head out, as papers do that count layers only.
        hidden_size: H.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key heads; default as many.
        head_dim: width of a head; default ``hidden_size / num_attention_heads``.
        has_attention_bias: all four projections are affine.
        num_experts: E; 0 is a dense model.
        num_experts_per_tok: K.
        moe_intermediate_size: I of one expert.
        shared_expert_intermediate_size: width of all shared experts; 0 is none.
        intermediate_size: width of the dense layers.
        first_k_dense_replace: how many layers are dense, from the first.
        num_matrices: of each network, 3 with a gate, 2 without.
        has_mlp_bias: every matrix of every network has a bias.
        router: how logits become gates.
        norm: RMS or layer norms.
        tie_word_embeddings: the head is the embedding.
        dtype: of the parameters.
    """

    model_type: Literal["piper"]
    source: str = ""
    vocab_size: NonNegativeInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    has_attention_bias: bool = False
    num_experts: NonNegativeInt = 0
    num_experts_per_tok: NonNegativeInt = 0
    moe_intermediate_size: NonNegativeInt = 0
    shared_expert_intermediate_size: NonNegativeInt = 0
    intermediate_size: NonNegativeInt = 0
    first_k_dense_replace: NonNegativeInt = 0
    num_matrices: Literal[2, 3] = 3
    has_mlp_bias: bool = False
    router: RouterKind = "softmax_topk"
    norm: NormKind = "rms"
    tie_word_embeddings: bool = False
    dtype: Dtype = "bfloat16"

    def describe(self, name: str) -> ModelDescription:
        """The model under ``name``.

        Raises:
            ConfigError: a width that some layer needs is missing.
        """
        heads = self.num_attention_heads
        requirement = f"be divisible by num_attention_heads = {heads}"
        fits = self.head_dim is not None or self.hidden_size % heads == 0
        require(fits, name, "hidden_size", requirement, self.hidden_size, "Or give head_dim.")
        attention = GroupedAttention(
            num_heads=heads,
            num_kv_heads=self.num_key_value_heads or heads,
            head_dim=self.head_dim or self.hidden_size // heads,
            has_qkv_bias=self.has_attention_bias,
            has_output_bias=self.has_attention_bias,
        )
        num_layers = self.num_hidden_layers
        num_dense = min(self.first_k_dense_replace, num_layers) if self.num_experts else num_layers
        layers: tuple[Layer, ...] = ()
        if num_dense:
            dense = self._network(name, "intermediate_size")
            layers += (Layer(attention=attention, dense=dense),) * num_dense
        if num_dense < num_layers:
            layer = Layer(attention=attention, experts=self._experts(name))
            layers += (layer,) * (num_layers - num_dense)
        return ModelDescription(
            name=name,
            family=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=layers,
            norm=self.norm,
            has_tied_embeddings=self.tie_word_embeddings,
            dtype=self.dtype,
            source=self.source,
        )

    def _network(self, name: str, size_key: str) -> FeedForward:
        """A network whose width stands under ``size_key``."""
        width: int = getattr(self, size_key)
        if width == 0:
            remedy = "Some layers of this model need it."
            raise ConfigError(instruction(name, size_key, "be above 0", width, remedy))
        return FeedForward(
            intermediate_size=width, num_matrices=self.num_matrices, has_bias=self.has_mlp_bias
        )

    def _experts(self, name: str) -> Experts:
        """The experts of a layer."""
        shared = None
        if self.shared_expert_intermediate_size:
            network = self._network(name, "shared_expert_intermediate_size")
            shared = SharedExperts(network=network)
        return Experts(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            network=self._network(name, "moe_intermediate_size"),
            router=self.router,
            shared=shared,
        )
