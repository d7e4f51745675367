"""Builtin plugin: model folders in the Hugging Face layout, and GGUF files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ksana.errors import ModelLoadError, UsageError
from ksana.markers import hookimpl

if TYPE_CHECKING:
    from ksana.kernels.base import KernelBackend
    from ksana.kernels.quantization import Weight
    from ksana.models.base import Model
    from ksana.types.config import ModelOptions
    from ksana.types.model import ModelConfig


@hookimpl(trylast=True)
def ksana_load_model_config(model_path: Path, options: ModelOptions) -> ModelConfig | None:
    """Read ``config.json`` of a folder, or the metadata of a ``.gguf`` file."""
    if model_path.suffix == ".gguf" and model_path.is_file():
        from ksana.models.gguf_config import load_gguf_config

        return load_gguf_config(model_path, options.dtype)
    from ksana.models.hf_config import CONFIG_FILE, load_hf_config

    if not (model_path / CONFIG_FILE).is_file():
        return None
    if options.quantization == "stored":
        raise UsageError(
            f"model {model_path}: --quantization stored is for GGUF files, this folder's weights are plain; "
            "use int8 or int4"
        )
    return load_hf_config(model_path, options.dtype)


@hookimpl(trylast=True)
def ksana_iter_weights(model_path: Path, config: ModelConfig) -> Iterable[tuple[str, Weight]] | None:
    """Read safetensors files, else PyTorch files, of a folder; or a ``.gguf`` file."""
    if model_path.is_file():
        from ksana.models.weights import gguf_reader

        return gguf_reader.iter_weights(model_path, config) if model_path.suffix == ".gguf" else None
    from ksana.models import multimodal
    from ksana.models.weights import safetensors_reader, torch_bin_reader

    for reader in (safetensors_reader, torch_bin_reader):
        if files := reader.find_files(model_path):
            weights = reader.iter_weights(files)
            return multimodal.text_weights(weights) if config.architecture in multimodal.ARCHITECTURES else weights
    raise ModelLoadError(
        f"{model_path}: no weights found; expected {safetensors_reader.SINGLE_FILE} or {torch_bin_reader.SINGLE_FILE}, "
        "or an index of several such files"
    )


@hookimpl(trylast=True)
def ksana_create_model(config: ModelConfig, backend: KernelBackend) -> Model | None:
    """Build the decoder of the Llama family."""
    from ksana.models.llama import ARCHITECTURES, LlamaModel

    return LlamaModel(config, backend) if config.architecture in ARCHITECTURES else None
