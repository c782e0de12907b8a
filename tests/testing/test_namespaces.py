"""Network namespaces: separate, seen by threads that follow, and reasons where there are none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from piper_kernels.testing import namespaces
from piper_kernels.testing.namespaces import why_no_namespaces

ROOT = Path(__file__).resolve().parents[2]
needs_namespaces = pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())

MOVES = """
import os, socket, threading
from piper_kernels.testing.namespaces import *
def network(): return os.stat("/proc/thread-self/ns/net").st_ino
home, name = network(), socket.gethostname()
way_back = os.open("/proc/self/ns/net", os.O_RDONLY)
descriptor = make_network()
inside = network()
assert inside != home
assert [n for _, n in socket.if_nameindex()] == ["lo"], "a new namespace has a loopback only"
enter_network_at(f"/proc/self/fd/{way_back}")
assert network() == home
enter_network(descriptor)
seen = []
thread = threading.Thread(target=lambda: seen.append(network()))
thread.start(); thread.join()
assert seen == [inside], "threads follow"
take_host_name("elsewhere")
assert socket.gethostname() == "elsewhere"
try:
    enter_network(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    assert "setns" in str(error), error
else:
    raise AssertionError("/dev/null is no namespace")
"""


@needs_namespaces
def test_namespaces_move_a_process_and_nothing_else() -> None:
    network, name = os.stat("/proc/self/ns/net").st_ino, os.uname().nodename
    done = subprocess.run(
        [sys.executable, "-c", MOVES], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert os.stat("/proc/self/ns/net").st_ino == network
    assert os.uname().nodename == name


def test_why_no_namespaces_names_a_missing_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    assert why_no_namespaces() == "ip and tc not found: install iproute2"


def test_why_no_namespaces_says_what_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(namespaces.os, "access", lambda *_: True)
    monkeypatch.setattr(namespaces, "_TRY", "raise SystemExit('no right')")
    assert why_no_namespaces().endswith("run as root: no right")


def test_why_no_namespaces_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "Linux only" in why_no_namespaces()
