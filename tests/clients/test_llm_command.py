"""The command ``llm`` with this server among its extra models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytest.importorskip("llm", reason="needs Python 3.11")

QUESTION = "What is the capital of France?"
BRIEFLY = ("-o", "temperature", "0", "-o", "max_tokens", "12")


@pytest.fixture
def llm(base_url: str, tmp_path: Path) -> Callable[..., str]:
    entry = {"model_name": "ksana-llm", "api_base": base_url, "supports_schema": True, "supports_tools": True}
    models = [{"model_id": "ksana", **entry}, {"model_id": "ksana-responses", "responses": True, **entry}]
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    # The package with the demo model is a plugin for this command, whose own requirements are not installed.
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_a_conversation(llm: Callable[..., str]) -> None:
    streamed = llm("-m", "ksana", QUESTION, *BRIEFLY)
    assert "Paris" in streamed
    assert llm("-m", "ksana", QUESTION, *BRIEFLY, "--no-stream") == streamed
    assert llm("-c", "And of Italy?", *BRIEFLY).strip()
    answers = json.loads(llm("logs", "--json", "-n", "0"))
    assert len({answer["conversation_id"] for answer in answers}) == 2


@pytest.mark.parametrize("model", ["ksana", "ksana-responses"])
def test_a_schema_and_a_tool(llm: Callable[..., str], model: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"certain": {"type": "boolean"}}, "required": ["certain"]})
    assert isinstance(json.loads(llm("-m", model, QUESTION, "--schema", schema, *BRIEFLY))["certain"], bool)
    assert llm("-m", model, QUESTION, "-T", "llm_version", *BRIEFLY).strip()
