"""Attention over two processes, as on two hosts, of four devices each."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_processes_agree_with_one_device():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("_host.py")
    hosts = [
        subprocess.Popen(
            [sys.executable, str(script), str(process), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for process in range(2)
    ]
    try:
        said = [host.communicate(timeout=300)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    for host, text in zip(hosts, said, strict=True):
        assert host.returncode == 0, text
        assert "equal on 4 of 8 devices" in text
