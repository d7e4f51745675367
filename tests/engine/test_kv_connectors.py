"""Which KV connectors an engine gets, and what tells their stores apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana import LLM
from ksana.errors import UsageError
from ksana.models.weights_digest import digest_weights
from ksana.testing.tiny_models import tiny_model


def test_an_unknown_connector_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--kv-connector cloud: .*built in are local and local_disk"):
        LLM(tiny_model(tmp_path), num_blocks=8, connectors=["cloud"])


def test_a_connector_without_prefix_caching_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"num_blocks": 8, "connectors": ["local_disk"], "disk_path": str(tmp_path / "blocks")}
    with LLM(tiny_model(tmp_path / "model"), enable_prefix_caching=False, host_memory_factor=1, **options):
        pass
    assert "without prefix caching, KV connectors store and find nothing: local_disk" in caplog.text


def test_weights_are_told_apart_by_content_and_size(tmp_path: Path) -> None:
    def digest(name: str, content: bytes) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        (folder / "config.json").write_text(name)
        return digest_weights(folder)

    first = digest("first", bytes(100_000))
    assert digest("copy", bytes(100_000)) == first
    assert digest("other", bytes(50_000) + bytes([1]) * 50_000) != first
    assert digest("longer", bytes(100_001)) != first
    assert digest("empty", b"") != first
