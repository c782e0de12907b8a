"""Expert sizes of published models, each with its source, and stated scaled-down variants.

Letters: H hidden_size, I intermediate_size, E num_experts, K top_k. The sizes are those of the
model's own ``config.json``; a configuration class's defaults are often another model's.
"""

from dataclasses import dataclass, replace

from piper_kernels.errors import ConfigError, did_you_mean, instruction, require


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The routed experts of one layer of a model.

    Attributes:
        name: how a bench calls it.
        H: hidden_size.
        I: intermediate_size of one expert.
        E: num_experts.
        K: top_k.
        family: Hugging Face's ``model_type``, whose classes the bench builds.
        source: where the numbers come from.
        shared_I: width of all shared experts together, 0 without.
    """

    name: str
    H: int
    I: int
    E: int
    K: int
    family: str
    source: str
    shared_I: int = 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the experts of one layer (three gated matrices each, biases apart)."""
        return 3 * self.E * self.H * self.I

    def with_experts(self, num_experts: int) -> "Shape":
        """The same layer with fewer experts, named ``<name>_e<num_experts>``."""
        remedy = f"{self.name} has {self.E} experts and top_k {self.K}."
        fits = self.K <= num_experts <= self.E
        require(fits, "Shape.with_experts", "num_experts", "be in [K, E]", num_experts, remedy)
        source = f"{self.source}; {num_experts} of its {self.E} experts"
        return replace(self, name=f"{self.name}_e{num_experts}", E=num_experts, source=source)

    def with_intermediate(self, intermediate_size: int) -> "Shape":
        """The same layer with narrower experts, named ``<name>_i<intermediate_size>``."""
        divides = 1 <= intermediate_size <= self.I and self.I % intermediate_size == 0
        function, argument = "Shape.with_intermediate", "intermediate_size"
        require(divides, function, argument, f"divide I = {self.I}", intermediate_size)
        source = f"{self.source}; {intermediate_size} of its {self.I} intermediate channels"
        name = f"{self.name}_i{intermediate_size}"
        return replace(self, name=name, I=intermediate_size, source=source)


def _model(
    name: str, family: str, model: str, sizes: tuple[int, int, int, int], shared_size: int = 0
) -> Shape:
    hidden, intermediate, experts, top_k = sizes
    return Shape(
        name=name,
        H=hidden,
        I=intermediate,
        E=experts,
        K=top_k,
        family=family,
        source=f"{model} config.json",
        shared_I=shared_size,
    )


MIXTRAL_8X7B = _model("mixtral_8x7b", "mixtral", "mistralai/Mixtral-8x7B-v0.1", (4096, 14336, 8, 2))
MIXTRAL_8X22B = _model(
    "mixtral_8x22b", "mixtral", "mistralai/Mixtral-8x22B-v0.1", (6144, 16384, 8, 2)
)
OLMOE = _model("olmoe_1b_7b", "olmoe", "allenai/OLMoE-1B-7B-0924", (2048, 1024, 64, 8))
QWEN1_5 = _model(
    "qwen1_5_moe_a2_7b", "qwen2_moe", "Qwen/Qwen1.5-MoE-A2.7B", (2048, 1408, 60, 4), 5632
)
QWEN2 = _model("qwen2_57b_a14b", "qwen2_moe", "Qwen/Qwen2-57B-A14B", (3584, 2560, 64, 8), 20480)
QWEN3_30B = _model("qwen3_30b_a3b", "qwen3_moe", "Qwen/Qwen3-30B-A3B", (2048, 768, 128, 8))
QWEN3_235B = _model("qwen3_235b_a22b", "qwen3_moe", "Qwen/Qwen3-235B-A22B", (4096, 1536, 128, 8))
DEEPSEEK_V2 = _model(
    "deepseek_v2", "deepseek_v2", "deepseek-ai/DeepSeek-V2", (5120, 1536, 160, 6), 3072
)
DEEPSEEK_V3 = _model(
    "deepseek_v3", "deepseek_v3", "deepseek-ai/DeepSeek-V3", (7168, 2048, 256, 8), 2048
)
GRANITE = _model(
    "granite_moe_3b", "granitemoe", "ibm-granite/granite-3.1-3b-a800m-instruct", (1536, 512, 40, 8)
)
GPT_OSS_20B = _model("gpt_oss_20b", "gpt_oss", "openai/gpt-oss-20b", (2880, 2880, 32, 4))
GPT_OSS_120B = _model("gpt_oss_120b", "gpt_oss", "openai/gpt-oss-120b", (2880, 2880, 128, 4))

MODELS = (
    MIXTRAL_8X7B,
    MIXTRAL_8X22B,
    OLMOE,
    QWEN1_5,
    QWEN2,
    QWEN3_30B,
    QWEN3_235B,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GRANITE,
    GPT_OSS_20B,
    GPT_OSS_120B,
)

# what a machine with 24 GiB can hold with gradients: a quarter of Mixtral's channels (one rank of
# four under tensor parallelism), an eighth of DeepSeek-V3's experts (one rank of eight under EP)
SCALED = (MIXTRAL_8X7B.with_intermediate(3584), DEEPSEEK_V3.with_experts(32))

SHAPES = {shape.name: shape for shape in (*MODELS, *SCALED)}


def find_shape(name: str) -> Shape:
    """Look a shape up by name.

    Raises:
        ConfigError: naming the nearest known shape.
    """
    if name not in SHAPES:
        remedy = did_you_mean(name, SHAPES)
        raise ConfigError(instruction("find_shape", "name", "be a known shape", repr(name), remedy))
    return SHAPES[name]
