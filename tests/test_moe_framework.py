"""PiperMoE inside what torch does to modules: autocast, checkpointing, copies, compile, func."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from piper_kernels import PiperMoE, RouterConfig, SharedExpertsConfig
from piper_kernels.config import GPT_OSS_SWIGLU
from piper_kernels.testing import assert_close_to_baseline

ROOT = Path(__file__).resolve().parents[1]
SHARED = SharedExpertsConfig(intermediate_size=5, is_gated_by_token=True)


def small_moe(**options: Any) -> PiperMoE:
    """H = 8, I = 6, E = 4, K = 2 with a gated shared expert, unless told otherwise."""
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_experts": 4, "top_k": 2}
    return PiperMoE(**{**sizes, "shared_experts": SHARED, **options})


def gradients(moe: nn.Module, y: Tensor, grad_y: Tensor, x: Tensor) -> dict[str, Tensor]:
    moe.zero_grad()
    x.grad = None
    (y * grad_y).sum().backward()
    return {"x": x.grad, **{name: p.grad for name, p in moe.named_parameters()}}


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moe_under_autocast(dtype: torch.dtype) -> None:
    """Field report A16: fp32 parameters, a linear layer behind it, a step with loss scaling."""
    moe, head = small_moe(), nn.Linear(8, 3)
    x, grad_y = torch.randn(7, 8), torch.randn(7, 8)
    with torch.autocast("cpu", dtype):
        y, stats = moe(x, return_stats=True)
        assert y.dtype == dtype == F.linear(x, head.weight.new_ones(8, 8)).dtype
        head(y).sum().backward()
    assert stats.routing.gates.dtype == stats.routing.logits.dtype == torch.float32
    assert torch.equal(stats.routing.logits, moe.router(x).logits), "the router is not narrowed"
    for name, parameter in moe.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
    # the routed part, against the same computation in fp64 and in this dtype
    routing, experts = stats.routing, moe.experts
    results = []
    for wide, narrow in ((torch.float64, torch.float64), (torch.float32, dtype)):
        state = {n: p.to(narrow) for n, p in experts.named_parameters()}
        arguments = (x.to(narrow), routing.expert_ids, routing.gates.to(wide))
        results.append(torch.func.functional_call(experts, state, arguments))
    with torch.autocast("cpu", dtype):
        actual = experts(x, routing.expert_ids, routing.gates)
    assert_close_to_baseline("y", actual, results[1], results[0])
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=2.0**8)
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.1)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in moe.parameters()]
    with torch.autocast("cpu", dtype):
        loss = (moe(x).float() * grad_y).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    for old, new in zip(before, moe.parameters(), strict=True):
        assert new.isfinite().all()
        assert not torch.equal(old, new)


@pytest.mark.parametrize("uses_autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize(
    ("x_dtype", "router_dtype", "expert_dtype"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float16),
        (torch.float64, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_moe_takes_mixed_dtypes(
    x_dtype: torch.dtype,
    router_dtype: torch.dtype,
    expert_dtype: torch.dtype,
    uses_autocast: bool,
) -> None:
    """Field report A17: y has x's dtype, each gradient its parameter's; under autocast as A16."""
    moe = small_moe(dtype=expert_dtype)
    moe.router.to(router_dtype)
    x = torch.randn(7, 8, dtype=x_dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast):
        y = moe(x)
    has_double = torch.float64 in (x_dtype, expert_dtype)
    assert y.dtype == (torch.bfloat16 if uses_autocast and not has_double else x_dtype)
    y.sum().backward()
    assert x.grad.dtype == x_dtype
    for name, parameter in moe.named_parameters():
        assert parameter.grad.dtype == parameter.dtype, name
        assert parameter.grad.isfinite().all(), name
    double = copy.deepcopy(moe).double()
    truth = double(x.detach().double(), routing=double.route(x.detach().double()))
    torch.testing.assert_close(y.double(), truth, rtol=0.05, atol=0.02)


# ---- activation checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["hooks", "reentrant"])
@pytest.mark.parametrize("uses_autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moe_recomputes_the_same_choices(
    dtype: torch.dtype, uses_autocast: bool, use_reentrant: bool
) -> None:
    """Field report A46: exactly tied logits and jitter; equal to the run without checkpointing."""
    moe = small_moe(router=RouterConfig(jitter=0.2), num_experts=8, dtype=dtype)
    moe.router.weight.data[4:] = moe.router.weight.data[:4]
    x = torch.randn(1, 8).expand(12, 8).contiguous().to(dtype).requires_grad_()
    grad_y = torch.randn(12, 8)
    choices = []
    moe.router.register_forward_hook(lambda _m, _a, routing: choices.append(routing.expert_ids))

    def inner(leaf: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast):
            return moe(leaf)

    results = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        y = checkpoint(inner, x, use_reentrant=use_reentrant) if checkpoints else inner(x)
        results.append({"y": y.detach(), **gradients(moe, y, grad_y, x)})
    assert len(choices) == 3
    assert torch.equal(choices[0], choices[1])
    assert torch.equal(choices[1], choices[2])
    assert_same(*results)


def test_moe_reuses_a_routing_from_outside_the_checkpoint() -> None:
    moe = small_moe()
    x, grad_y = torch.randn(9, 8, requires_grad=True), torch.randn(9, 8)
    num_routings = 0

    def count(*_: Any) -> None:
        nonlocal num_routings
        num_routings += 1

    plain = gradients(moe, moe(x), grad_y, x)
    moe.router.register_forward_hook(count)
    y = checkpoint(lambda leaf, r: moe(leaf, routing=r), x, moe.route(x), use_reentrant=False)
    assert_same(gradients(moe, y, grad_y, x), plain)
    assert num_routings == 1


# ---- copies and files


@pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch_save", "state_dict"])
def test_moe_copies_are_equal_and_independent(how: str, is_used: bool) -> None:
    """Field report A47."""
    router = RouterConfig(kind="sigmoid_topk", has_bias=True, has_correction_bias=True)
    moe = small_moe(router=router, has_expert_bias=True)
    x = torch.randn(5, 8)
    moe.router.update_correction_bias(torch.tensor([9, 0, 0, 0]), speed=0.5)
    if is_used:
        moe(x).sum().backward()
    if how == "deepcopy":
        twin = copy.deepcopy(moe)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(moe))
    elif how == "torch_save":
        file = io.BytesIO()
        torch.save(moe, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    else:
        twin = small_moe(router=router, has_expert_bias=True)
        twin.load_state_dict(moe.state_dict(), strict=True)
    before = moe(x).detach()
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        for tensor in [*twin.parameters(), *twin.buffers()]:
            tensor.add_(1.0)
    assert torch.equal(moe(x), before)


def test_moe_state_dict_names_are_the_contract() -> None:
    router = RouterConfig(kind="sigmoid_topk", has_bias=True, has_correction_bias=True)
    moe = small_moe(router=router, has_expert_bias=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in moe.state_dict().items()}
    assert shapes == {
        "router.weight": (4, 8),
        "router.bias": (4,),
        "router.correction_bias": (4,),
        "experts.gate_up_proj": (4, 12, 8),
        "experts.down_proj": (4, 8, 6),
        "experts.gate_up_proj_bias": (4, 12),
        "experts.down_proj_bias": (4, 8),
        "shared_experts.gate_proj.weight": (5, 8),
        "shared_experts.up_proj.weight": (5, 8),
        "shared_experts.down_proj.weight": (8, 5),
        "shared_experts.gate.weight": (1, 8),
    }


# ---- torch.func


def test_moe_under_functional_call_and_grad() -> None:
    """Field report A48."""
    moe = small_moe()
    x, grad_y = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)
    parameters = dict(moe.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.func.functional_call(moe, parameters, (x,)) * grad_y).sum()

    found = torch.func.grad(loss)({n: p.detach() for n, p in parameters.items()}, x.detach())
    expected = gradients(moe, moe(x), grad_y, x)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], msg=name)


# torch says that it loops over the samples in scatter_: slow, but right
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_moe_under_vmap_of_grad_equals_a_loop() -> None:
    """Field report A48: per-sample gradients."""
    moe = small_moe()
    parameters = {name: p.detach() for name, p in moe.named_parameters()}
    samples = torch.randn(3, 5, 8)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(moe, parameters, (x,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, samples)
    loop = [torch.func.grad(loss)(parameters, sample) for sample in samples]
    for name, grads in per_sample.items():
        torch.testing.assert_close(grads, torch.stack([g[name] for g in loop]), msg=name)


# torch's own forward mode scripts its decompositions
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_moe_has_forward_mode_with_the_reference_backend() -> None:
    """Field report A48: jvp works where it is offered, and is refused clearly where it is not."""
    moe = small_moe(backend="reference", dtype=torch.float64)
    x, tangent = torch.randn(2, 4, 8, dtype=torch.float64).unbind()
    _, found = torch.func.jvp(moe, (x,), (tangent,))
    jacobian = torch.autograd.functional.jacobian(moe, x)
    torch.testing.assert_close(found, torch.einsum("abcd,cd->ab", jacobian, tangent))
    with pytest.raises(RuntimeError, match=r"forward.mode"):
        torch.func.jvp(small_moe(dtype=torch.float64), (x,), (tangent,))


# ---- torch.compile


# torch.compile itself instantiates the Functions that it traces
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"activation": GPT_OSS_SWIGLU, "router": RouterConfig(has_bias=True), "capacity_factor": 1},
        pytest.param({"shared_experts": None}, marks=pytest.mark.slow),
    ],
    ids=["everything", "routed_only"],
)
def test_moe_compiles_without_graph_breaks(options: dict[str, Any]) -> None:
    """Field report A49: any T, changing routing, empty experts, and no recompilation for them."""
    moe = small_moe(**options)
    num_graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend=backend)
    compiled_at = []
    for num_tokens in (16, 17, 64, 1, 0, 16):
        num_before = num_graphs
        x = torch.randn(num_tokens, 8, requires_grad=True)
        grad_y = torch.randn(num_tokens, 8)
        expected = {"y": moe(x).detach(), **gradients(moe, moe(x), grad_y, x)}
        y, stats = compiled(x, return_stats=True)
        found = {"y": y.detach(), **gradients(moe, y, grad_y, x)}
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=f"{name} at T = {num_tokens}")
        assert stats.expert_counts.sum() == 2 * num_tokens
        if num_graphs > num_before:
            compiled_at.append(num_tokens)
    # torch compiles anew for sizes 0 and 1, whatever the code does
    assert compiled_at == [16, 1, 0]


# ---- construction


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_moe_from_the_meta_device(dtype: torch.dtype) -> None:
    """Field report A56: to_empty and reset_parameters leave nothing uninitialised."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    router = RouterConfig(kind="sigmoid_topk", has_bias=True, has_correction_bias=True)
    options: dict[str, Any] = {**sizes, "router": router, "has_expert_bias": True, "dtype": dtype}
    with torch.device("meta"):
        moe = small_moe(**options)
    assert all(tensor.is_meta for tensor in moe.state_dict().values())
    moe.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in moe.state_dict().values():
            tensor.fill_(torch.nan)
    moe.reset_parameters()
    direct = small_moe(**options)
    for (name, tensor), other in zip(
        moe.state_dict().items(), direct.state_dict().values(), strict=True
    ):
        assert tensor.device.type == "cpu"
        assert tensor.dtype == other.dtype
        assert tensor.isfinite().all(), name
        if tensor.numel() > 100:
            # a uniform distribution's sample deviation is within 20 % of the truth at this size
            torch.testing.assert_close(tensor.float().std(), other.float().std(), rtol=0.2, atol=0)
        elif "bias" in name:
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
    assert moe(torch.randn(3, 64, dtype=dtype)).isfinite().all()


def test_moe_starts_like_linear_layers() -> None:
    moe = PiperMoE(48, 64, 16, 2, shared_experts=SharedExpertsConfig(intermediate_size=32))
    for name, fan_in in (
        ("router.weight", 48),
        ("experts.gate_up_proj", 48),
        ("experts.down_proj", 64),
        ("shared_experts.up_proj.weight", 48),
        ("shared_experts.down_proj.weight", 32),
    ):
        weight, bound = moe.get_parameter(name), fan_in**-0.5
        assert weight.abs().max() <= bound, name
        assert weight.abs().max() > 0.98 * bound, name
        torch.testing.assert_close(weight.std().item(), bound / 3**0.5, rtol=0.05, atol=0)
        assert abs(weight.mean().item()) < 0.1 * bound, name


def test_moe_moves_between_dtypes() -> None:
    """Field report A56: .to() in any order; the correction bias stays fp32."""
    moe = small_moe(router=RouterConfig(kind="sigmoid_topk", has_correction_bias=True))
    moe.router.correction_bias.copy_(torch.tensor([0.001, 1.001, -0.5, 0.25]))
    before = moe.router.correction_bias.clone()
    moe.to(torch.bfloat16).to("cpu")
    assert {p.dtype for p in moe.parameters()} == {torch.bfloat16}
    assert torch.equal(moe.router.correction_bias, before)
    assert moe(torch.randn(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert moe.half().router.correction_bias.dtype == torch.float32
    assert moe.double().router.correction_bias.dtype == torch.float64
    assert moe.float().router.correction_bias.dtype == torch.float32


# ---- memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_moe_keeps_x_once_and_the_preactivation(dtype: torch.dtype) -> None:
    """The router adds no copy of x, in fp32 or otherwise, to what the experts keep."""
    T, H, I, E, K = 512, 256, 64, 8, 2
    moe = PiperMoE(H, I, E, K, dtype=dtype)
    x = torch.randn(T, H, dtype=dtype, requires_grad=True)
    parameters = {p.untyped_storage().data_ptr() for p in moe.parameters()}
    kept_bytes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        moe(x)
    big = (T * H + T * K * 2 * I) * dtype.itemsize
    # the router's weight in fp32, its probabilities; 32 bytes of ids, gates and maps per slot
    small = 4 * E * H + 4 * T * E + 32 * T * K + 64 * E
    assert big < sum(kept_bytes.values()) <= big + small


# ---- frozen parts


@pytest.mark.parametrize(
    "frozen", ["router", "experts", "experts.down_proj", "shared_experts", "x"]
)
def test_moe_with_frozen_parts(frozen: str) -> None:
    """Field report A57: no gradient for what is frozen, the same ones for the rest."""
    moe = small_moe()
    x, grad_y = torch.randn(7, 8, requires_grad=True), torch.randn(7, 8)
    expected = gradients(moe, moe(x), grad_y, x)
    for name, parameter in moe.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    x = x.detach().requires_grad_(frozen != "x")
    found = gradients(moe, moe(x), grad_y, x)
    for name, grad in found.items():
        if name.startswith(frozen):
            assert grad is None, name
        else:
            torch.testing.assert_close(grad, expected[name], msg=name)


# ---- a machine without triton


def test_moe_runs_without_triton(tmp_path: Path) -> None:
    """Field report A26: import, training, files; asking for triton is a clear error."""
    script = f"""
import sys
sys.modules["triton"] = None
import torch
from piper_kernels import PiperMoE
moe = PiperMoE(8, 6, 4, 2)
before = moe.experts.down_proj.detach().clone()
moe(torch.randn(5, 8)).square().sum().backward()
moe.experts.down_proj.data -= 0.1 * moe.experts.down_proj.grad
assert not torch.equal(moe.experts.down_proj, before)
torch.save(moe.state_dict(), {str(tmp_path / "moe.pt")!r})
moe.load_state_dict(torch.load({str(tmp_path / "moe.pt")!r}))
try:
    PiperMoE(8, 6, 4, 2, backend="triton")(torch.randn(5, 8))
except Exception as error:
    print(type(error).__name__, error)
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("BackendError experts: backend must be able to run here")
    assert "no triton package" in run.stdout


def test_moe_offloaded_by_accelerate() -> None:
    """Offloaded weights lie on meta until their own module is called."""
    accelerate = pytest.importorskip("accelerate")
    moe, x = small_moe(), torch.randn(5, 8)
    wanted = moe(x)
    routing = moe.route(x)
    accelerate.cpu_offload(moe, execution_device=torch.device("cpu"))
    assert moe.router.weight.is_meta
    assert torch.equal(moe(x), wanted)
    assert torch.equal(moe(x, routing=routing), wanted)
