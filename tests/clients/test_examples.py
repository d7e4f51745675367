"""The examples that talk to a server, run as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, base_url: str) -> str:
    command = [sys.executable, str(EXAMPLES / example), "--base-url", base_url]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_model_calls_a_tool_and_answers_with_its_result(base_url: str) -> None:
    call, answer = run("tool_calling.py", base_url).split("\n", 1)
    assert call == "get_temperature({'city': 'Paris'}) -> It is 21 degrees Celsius in Paris."
    assert "21" in answer


def test_facts_are_extracted(base_url: str) -> None:
    facts = run("extract.py", base_url)
    assert "name='Frida Kahlo'" in facts
    assert "birth_year=1907" in facts
