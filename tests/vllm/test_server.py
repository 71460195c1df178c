"""An unchanged server: nothing of Collegium is said on its command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from cases import SHIPPED

if TYPE_CHECKING:
    from pathlib import Path


def test_server_runs_experts_through_collegium(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, url = tmp_path / "server.log", f"http://127.0.0.1:{port}"
    # what `vllm serve` starts; that command asks for a package called vllm, which the CPU build is not
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", SHIPPED, "--port", str(port)]
    options = ["--max-model-len", "256", "--enforce-eager", "--served-model-name", "fables"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("COLLEGIUM")}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as file:
        server = subprocess.Popen([*command, *options], stdout=file, stderr=file, env=env)
    try:
        for _ in range(300):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        asked = {"model": "fables", "prompt": "The old king", "max_tokens": 12, "temperature": 0}
        head = {"Content-Type": "application/json"}
        texts: list[str] = []
        for _ in range(2):
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(asked).encode(), head)
            with urllib.request.urlopen(request, timeout=120) as answer:
                texts.append(json.loads(answer.read())["choices"][0]["text"])
        assert texts[0] == texts[1]
        assert len(texts[0].split()) > 3
        assert "Collegium: runs the experts of" in log.read_text()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
