"""What the README shows is tried as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ADDRESS = "http://127.0.0.1:8080"

# Threads that spin for each other are slow beyond measure where other processes want the same cores.
ENVIRONMENT = {**os.environ, "KSANA_KERNEL_THREADS": "1"}


def block(language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return str(found)


def python(*arguments: str, **variables: str) -> str:
    environment = ENVIRONMENT | variables
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def address(serve_demo: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    with serve_demo() as greeting:
        found = greeting.split()[4]
        # The README shows this line.
        assert greeting.replace(found, ADDRESS) in README
        yield found


def test_the_openai_client_streams_an_answer(address: str) -> None:
    assert "Paris" in python("-c", block("python", "OpenAI").replace(ADDRESS, address))


def test_the_native_api_answers_the_curl_command(address: str) -> None:
    words = shlex.split(block("sh", "curl").replace("\\\n", " "))
    url, header, body = words[1].replace(ADDRESS, address), words[3], words[5]
    assert [words[0], words[2], words[4]] == ["curl", "-H", "-d"]
    request = urllib.request.Request(url, body.encode(), dict([header.split(": ")]))
    with urllib.request.urlopen(request) as response:
        assert len(json.load(response)["texts"]) == 1


def test_offline_batches() -> None:
    assert "Paris" in python("-c", block("python", "LLM("))


def test_the_configuration_file_is_valid(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(block("yaml", "scheduler"))
    file = str(tmp_path / "serve.yaml")
    shown = python("-m", "ksana.cli.serve", "--config-file", file, "--print-config")
    assert {"max_num_seqs: 64", "split_fuse_token_num: 256", "port: 9000"} <= {
        line.partition("#")[0].strip() for line in shown.splitlines()
    }


def test_the_plugin_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "shout.py").write_text(block("python", "shout.py"))
    # --help loads the plugins and checks them against the specifications.
    assert python("-m", "ksana.cli.serve", "-p", "shout", "--help", PYTHONPATH=str(tmp_path))


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []
