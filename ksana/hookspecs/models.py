"""Hooks that find, build and fill a model, and turn its text into tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ksana.markers import hookspec

if TYPE_CHECKING:
    from ksana.kernels.base import KernelBackend
    from ksana.kernels.quantization import Weight
    from ksana.models.base import Model
    from ksana.text.chat_template import ChatTemplate
    from ksana.text.tokenizer import Tokenizer
    from ksana.types.config import ModelOptions
    from ksana.types.model import ModelConfig


@hookspec(firstresult=True)
def ksana_load_model_config(model_path: Path, options: ModelOptions) -> ModelConfig | None:
    """Describe the model at ``model_path`` (a folder or a file), or return None if it is not yours.

    When: once at start. Firstresult. Raise :class:`ksana.errors.ModelLoadError` for a damaged or unsupported model.

    Example::

        @hookimpl
        def ksana_load_model_config(model_path, options):
            if (model_path / "my_format.toml").exists():
                return my_package.read_config(model_path)
    """


@hookspec(firstresult=True)
def ksana_create_model(config: ModelConfig, backend: KernelBackend) -> Model | None:
    """Build the model class for ``config.architecture``, its weights not yet filled, or return None.

    When: once at start. Firstresult.

    Example::

        @hookimpl
        def ksana_create_model(config, backend):
            if config.architecture == "MyForCausalLM":
                return MyModel(config, backend)
    """


@hookspec(firstresult=True)
def ksana_iter_weights(model_path: Path, config: ModelConfig) -> Iterable[tuple[str, Weight]] | None:
    """Yield (Hugging Face parameter name, CPU tensor) for every weight, one at a time, or return None.

    When: once at start, before the model and its backend are made; the iterable is consumed once, after that. A reader
    may begin to work on threads of its own in between, when torch has yet to be imported. Firstresult. Tensors may be
    memory-mapped and of any float dtype; they are copied or adopted before the next one is asked for. If
    ``config.quantization`` is ``stored``, matrices that the file holds quantised may come as
    :class:`ksana.kernels.quantization.QuantizedWeight`; else they must not. Yield the largest first if you can: the
    peak of memory is lower. Raise :class:`ksana.errors.ModelLoadError` naming the file and the tensor.

    Example::

        @hookimpl
        def ksana_iter_weights(model_path, config):
            if model_path.suffix == ".npz":
                return ((name, torch.from_numpy(a)) for name, a in np.load(model_path, allow_pickle=False).items())
    """


@hookspec(firstresult=True)
def ksana_create_tokenizer(model_path: Path, config: ModelConfig) -> Tokenizer | None:
    """Create the tokenizer at ``model_path``, or return None.

    When: once at start. Firstresult.

    Example::

        @hookimpl
        def ksana_create_tokenizer(model_path, config):
            if config.name == "bytes":
                return MyByteTokenizer()
    """


@hookspec(firstresult=True)
def ksana_create_chat_template(model_path: Path, config: ModelConfig) -> ChatTemplate | None:
    """Create the chat template, or return None. If nobody has one, chat requests are refused and all else works.

    When: once at start. Firstresult.

    Example::

        @hookimpl
        def ksana_create_chat_template(model_path, config):
            if config.name == "mine":
                return ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    """
