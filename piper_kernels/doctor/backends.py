"""Which backend runs on each kind of device here, why, and whether it computes the right thing."""

from piper_kernels.doctor.findings import Finding


def judge_backend(device: str, backend: str, reason: str, *, is_fallback: bool) -> Finding:
    """Judge one choice. Pure."""
    advice = "Slower than this device deserves; the reason says what is missing."
    return Finding(
        area="backends",
        name=device,
        value=f"{backend}: {reason}",
        status="warning" if is_fallback else "ok",
        advice=advice if is_fallback else "",
    )


def judge_proof(device: str, error: Exception | None) -> Finding:
    """Judge the self-test of a device: ``None`` is a pass."""
    name = f"{device}, self-test"
    if error is None:
        value = "experts, forward and backward, agree with the oracle"
        return Finding(area="backends", name=name, value=value)
    return Finding(
        area="backends",
        name=name,
        value=f"{type(error).__name__}: {error}",
        status="broken",
        advice="backend='reference' still works. Please report this with `piper doctor --json`.",
    )


def prove(device: str) -> None:
    """Run the experts op forward and backward on a device and compare with the oracle in fp64.

    Raises:
        Exception: whatever goes wrong; an AssertionError if the result does.
    """
    import torch

    from piper_kernels.functional.experts import experts
    from piper_kernels.reference.experts import experts as oracle

    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) - 0.5

    # T=5, H=32, I=16, E=4, K=2; expert 3 gets no token
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    floats = (uniform(5, 32), uniform(5, 2), uniform(4, 32, 32), uniform(4, 32, 16))
    grad_y = uniform(5, 32)

    def run(function: object, dtype: torch.dtype, place: str) -> list[torch.Tensor]:
        leaves = [t.to(place, dtype).requires_grad_() for t in floats]
        x, gates, gate_up, down = leaves
        y = function(x, ids.to(place), gates, gate_up, down)  # type: ignore[operator]
        grads = torch.autograd.grad(y, leaves, grad_y.to(place, dtype))
        return [t.detach().double().cpu() for t in (y, *grads)]

    results = run(experts, torch.float32, device), run(oracle, torch.float64, "cpu")
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-4)


def check_backends() -> list[Finding]:
    """Ask the library's own choice for each kind of device here, and prove it."""
    import torch

    from piper_kernels.functional.backend import THIS_MACHINE, choose_backend

    findings = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        choice = choose_backend("experts", "auto", device, torch.float32, THIS_MACHINE)
        findings.append(
            judge_backend(device, choice.backend, choice.reason, is_fallback=choice.is_fallback)
        )
        error: Exception | None = None
        try:
            prove(device)
        # the self-test exists to find out what a machine raises
        except Exception as caught:
            error = caught
        findings.append(judge_proof(device, error))
    return findings
