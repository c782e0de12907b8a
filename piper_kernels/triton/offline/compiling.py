"""Compile one recorded launch for one target, exactly as Triton would at launch, without a GPU."""

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from piper_kernels.triton.launch import Launch
from piper_kernels.triton.offline.assembly import Resources, read_amd, read_nvidia


def gpu_target(name: str) -> GPUTarget:
    """Triton's name of a target.

    Example:
        >>> gpu_target("sm_90").arch, gpu_target("gfx942").warp_size
        (90, 64)
    """
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64)


def specialize(launch: Launch, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """What Triton would compile for a launch on a target, and with which options.

    Signature, constants and hints (divisibility, strides of 1, AMD's 32-bit offsets) come from the
    arguments by Triton's own code, the one that ``kernel[grid](...)`` runs.
    """
    backend = make_backend(target)
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    arguments = {**launch.arguments, "debug": False}
    bound, specialization, options = bind(**arguments)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, arguments, bound, specialization, options
    )
    return ASTSource(kernel, signature, constexprs, attrs), options.__dict__


def _tool(name: str, *arguments: str, cubin: bytes) -> str:
    """What one of the NVIDIA tools in Triton's wheel says of a cubin."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_launch(launch: Launch, target_name: str) -> Resources:
    """Compile and read the result.

    Args:
        launch: of a kernel that is not interpreted.
        target_name: e.g. ``"sm_90"``.
    """
    target = gpu_target(target_name)
    source, options = specialize(launch, target)
    compiled = triton.compile(source, target=target, options=options)
    num_warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    if target.backend == "hip":
        return read_amd(compiled.asm["amdgcn"], num_warps=num_warps, shared_bytes=shared)
    cubin = compiled.asm["cubin"]
    return read_nvidia(
        compiled.asm["ptx"],
        usage=_tool("cuobjdump", "--dump-resource-usage", cubin=cubin),
        sass=_tool("nvdisasm", "--print-code", cubin=cubin),
        num_warps=num_warps,
        shared_bytes=shared,
    )
