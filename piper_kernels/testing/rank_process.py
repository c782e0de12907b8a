"""What happens inside one rank's process; :mod:`piper_kernels.testing.ranks` starts it."""

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from piper_kernels.testing.namespaces import enter_network_at, take_host_name

STACK_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionAddress:
    """Where a function is found again in another process: its module, that module's file, its name.

    The file matters because a test module is often not importable by name (pytest's importlib mode
    keeps its folder off ``sys.path``), or another module has the same name.
    """

    module: str
    path: str
    name: str

    def load(self) -> Callable[..., Any]:
        """Get the function; run its file if the module's name does not lead there."""
        target: Any = self._module()
        for part in self.name.split("."):
            target = getattr(target, part)
        return target

    def _module(self) -> ModuleType:
        known = sys.modules.get(self.module)
        if known is not None and self._is_home(getattr(known, "__file__", None)):
            return known
        if self._is_home(_origin(self.module)):
            return importlib.import_module(self.module)
        spec = importlib.util.spec_from_file_location(self.module, self.path)
        assert spec is not None, f"{self.path} is not a Python file"
        assert spec.loader is not None, f"{self.path} has no loader"
        module = importlib.util.module_from_spec(spec)
        # arguments that were pickled by reference to this module find it under its old name
        sys.modules[self.module] = module
        spec.loader.exec_module(module)
        return module

    def _is_home(self, path: str | None) -> bool:
        return path is not None and os.path.realpath(path) == os.path.realpath(self.path)


def _origin(module: str) -> str | None:
    """The file that ``import module`` would run, or ``None``."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where a rank runs, if not on the caller's own host and network.

    Attributes:
        namespace: path of the network namespace.
        host: what the rank sees as its host's name.
        interface: that gloo uses there.
        local_rank: position on its node.
        num_local_ranks: ranks on its node.
    """

    namespace: str
    host: str
    interface: str
    local_rank: int
    num_local_ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTask:
    """All that a rank needs to know.

    Attributes:
        function: what to call.
        packed_args: its pickled arguments; unpacked after the function's module is loaded.
        rank: this rank.
        num_ranks: world size.
        backend: of the process group, e.g. ``gloo``.
        store_port: of the TCP store that the parent keeps on this host.
        timeout_s: of the process group, in seconds.
        environment: the caller's ``os.environ``; the server that forks ranks keeps an older one.
        packed_warning_filters: the caller's pickled ``warnings.filters``.
        log_path: stdout and stderr of the rank.
        stack_path: Python stacks, if the rank hangs or crashes.
        place: where it runs; ``None`` is here.
    """

    function: FunctionAddress
    packed_args: bytes
    rank: int
    num_ranks: int
    backend: str
    store_port: int
    timeout_s: float
    environment: dict[str, str]
    packed_warning_filters: bytes
    log_path: Path
    stack_path: Path
    place: RankPlace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What a rank tells its parent when its function ends.

    Attributes:
        kind: whether the function returned or raised.
        packed_result: the pickled return value (``returned``).
        error: one line, ``ValueError: ...`` (``raised``).
        stack: the traceback (``raised``).
    """

    kind: Literal["returned", "raised"]
    packed_result: bytes = b""
    error: str = ""
    stack: str = ""


def run_rank(task: RankTask, parent: Connection) -> None:
    """Entry point of a rank's process: prepare, join the group, call, report, leave."""
    try:
        _prepare_process(task)
        _join_group(task)
        function = task.function.load()
        result = function(*pickle.loads(task.packed_args))
        report = RankReport(kind="returned", packed_result=pickle.dumps(result))
    # pytest's outcomes and SystemExit are reported too, though they are no Exceptions
    except BaseException as error:
        parent.send(_report_of(error))
        sys.stdout.flush()
        # at once: an orderly exit may block, and the peers wait for the sockets to close
        os._exit(1)
    parent.send(report)
    _await_the_others(parent)
    if dist.is_initialized():
        dist.destroy_process_group()


def _prepare_process(task: RankTask) -> None:
    """Own session, output files, environment, warning filters, one thread."""
    # the parent kills the whole session, so what a rank started dies with it
    os.setsid()
    _die_with_parent()
    log = os.open(task.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    stacks = os.fdopen(os.open(task.stack_path, os.O_WRONLY | os.O_CREAT, 0o600), "w")
    faulthandler.enable(file=stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks)
    os.environ.clear()
    os.environ.update(task.environment)
    warnings.resetwarnings()
    warnings.filters[:] = pickle.loads(task.packed_warning_filters)  # type: ignore[index]
    torch.set_num_threads(1)


def _die_with_parent() -> None:
    """Kill this rank and what it has started as soon as the caller is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is always started by multiprocessing"

    def wait_for_death() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_for_death, daemon=True).start()


def _join_group(task: RankTask) -> None:
    """Make the default process group over the parent's store; set torchrun's variables too."""
    place = task.place
    os.environ.update(
        RANK=str(task.rank),
        WORLD_SIZE=str(task.num_ranks),
        LOCAL_RANK=str(place.local_rank if place else task.rank),
        LOCAL_WORLD_SIZE=str(place.num_local_ranks if place else task.num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(task.store_port),
        # the parent keeps the store: no rank may try to open one on this port
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    # without it gloo resolves the host's name, which many machines map to an address that is down
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=task.timeout_s)
    store = TCPStore("127.0.0.1", task.store_port, is_master=False, timeout=timeout)
    if place is not None:
        # the store's connection keeps the network in which it was made
        enter_network_at(place.namespace)
        take_host_name(place.host)
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    dist.init_process_group(
        task.backend, store=store, rank=task.rank, world_size=task.num_ranks, timeout=timeout
    )


def _report_of(error: BaseException) -> RankReport:
    """Describe an exception, without the frame of this file that called the function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next:
        trace = trace.tb_next
    stack = "".join(traceback.format_exception(type(error), error, trace))
    line = traceback.format_exception_only(type(error), error)[-1].strip()
    return RankReport(kind="raised", error=line, stack=stack)


def _await_the_others(parent: Connection) -> None:
    """Keep the sockets open until every rank has ended: a peer may still be receiving."""
    try:
        parent.recv()
    except EOFError:
        return
