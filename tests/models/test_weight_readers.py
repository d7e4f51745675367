from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ksana.builtins.hf_models import ksana_iter_weights
from ksana.errors import ModelLoadError
from ksana.models.gguf_config import load_gguf_config
from ksana.models.hf_config import load_hf_config

Tiny = Callable[..., Path]


def read(path: Path) -> dict[str, torch.Tensor]:
    config = load_gguf_config(path) if path.is_file() else load_hf_config(path)
    weights = list(ksana_iter_weights(path, config) or ())
    assert len(dict(weights)) == len(weights), "a tensor came twice"
    # Clones, so that a reader that reuses memory shows.
    return {name: tensor.clone() for name, tensor in weights}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert sorted(ours) == sorted(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].float(), tensor.float()), name


def copy_with(folder: Path, target: Path, save: Callable[[dict[str, torch.Tensor], Path], None]) -> Path:
    """The model of ``folder`` with its weights saved another way."""
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    save(load_file(folder / "model.safetensors"), target)
    return target


def save_sharded(state: dict[str, torch.Tensor], folder: Path, suffix: str, save: Callable[..., None]) -> None:
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {name: f"{stem}-{index % 3}.{suffix}" for index, name in enumerate(state)}
    for file in set(weight_map.values()):
        save({name: state[name] for name, where in weight_map.items() if where == file}, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SAVERS: dict[str, Callable[[dict[str, torch.Tensor], Path], None]] = {
    "sharded safetensors": lambda state, folder: save_sharded(state, folder, "safetensors", save_file),
    "bin": lambda state, folder: torch.save(state, folder / "pytorch_model.bin"),
    "old bin": lambda state, folder: torch.save(
        state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    ),
    "sharded bin": lambda state, folder: save_sharded(state, folder, "bin", torch.save),
}


@pytest.mark.parametrize("kind", SAVERS)
def test_all_file_kinds_give_the_same_tensors(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    folder = tiny("qwen2")
    expected = load_file(folder / "model.safetensors")
    assert_same(read(folder), expected)
    assert_same(read(copy_with(folder, tmp_path / "copy", SAVERS[kind])), expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_gives_the_same_tensors(
    tiny: Tiny, write_gguf: Callable[..., Path], tmp_path: Path, architecture: str
) -> None:
    folder = tiny(architecture, tie_word_embeddings=architecture == "qwen3")
    assert_same(read(write_gguf(folder, tmp_path / "m.gguf", architecture)), load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantised_gguf_equals_the_librarys_decoding(
    tiny: Tiny, write_gguf: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    folder = tiny("qwen2")
    path = write_gguf(folder, tmp_path / "m.gguf", "qwen2", kind)
    type_ = gguf.GGMLQuantizationType[kind]
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    expected = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        decoded = weight.numpy() if weight.ndim == 1 else gguf.dequantize(gguf.quantize(weight.numpy(), type_), type_)
        expected[name] = torch.from_numpy(np.array(decoded)).to(dtype)
    assert_same(read(path), expected)


def test_llama_gguf_equals_transformers(tiny: Tiny, write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    # An independent reading of the layout, the order of rows in q and k above all.
    path = write_gguf(tiny("llama"), tmp_path / "m.gguf", "llama", "Q8_0")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, quantization_config=transformers.GgufConfig(dequantize=True)
    )
    config = load_gguf_config(path, "float32")
    assert_same(dict(ksana_iter_weights(path, config) or ()), reference.state_dict())


@pytest.mark.parametrize("kind", ["safetensors", "bin", "gguf"])
def test_the_largest_comes_first(tiny: Tiny, write_gguf: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    path = tiny("llama")
    if kind == "bin":
        path = copy_with(path, tmp_path / "copy", SAVERS["bin"])
    elif kind == "gguf":
        path = write_gguf(path, tmp_path / "m.gguf", "llama")
    sizes = [tensor.nbytes for tensor in read(path).values()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["safetensors", "bin", "gguf"])
def test_what_has_been_read_does_not_stay_in_memory(tmp_path: Path, kind: str) -> None:
    num_tensors, rows = 24, 2**20
    if kind == "gguf":
        target: Path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(target, "qwen2")
        for index in range(num_tensors):
            writer.add_tensor(f"blk.{index}.ffn_up.weight", np.zeros((rows // 8, 16), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        target = tmp_path
        state = {f"t{index}": torch.zeros(rows // 8, 16) for index in range(num_tensors)}
        if kind == "bin":
            torch.save(state, tmp_path / "pytorch_model.bin")
        else:
            save_file(state, tmp_path / "model.safetensors")
    code = f"""
from pathlib import Path
from types import SimpleNamespace
from ksana.builtins.hf_models import ksana_iter_weights
import gguf, torch
from ksana.models.weights import gguf_reader

def status(key):
    return next(int(l.split()[1]) for l in Path('/proc/self/status').read_text().splitlines() if l.startswith(key))

total = torch.zeros(16)
before = status('VmRSS')
config = SimpleNamespace(architecture="", dtype='float32', quantization='none')
weights = ksana_iter_weights(Path({str(target)!r}), config)
peak = 0
for name, tensor in weights:
    total += tensor.sum(0)
    peak = max(peak, status('VmRSS') - before)
print(peak // 1024)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    # The file has 192 MiB; a batch 64, and the next one is mapped before the last tensor of the last one goes.
    assert int(result.stdout) < 110


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
@pytest.mark.parametrize("kind", ["safetensors", "bin", "gguf"])
def test_truncated_file_is_named(
    tiny: Tiny, write_gguf: Callable[..., Path], tmp_path: Path, kind: str, keep: int
) -> None:
    folder = tiny("llama")
    if kind == "gguf":
        path = file = write_gguf(folder, tmp_path / "m.gguf", "llama")
    else:
        path = copy_with(folder, tmp_path / "copy", SAVERS["bin"])
        file = path / "pytorch_model.bin"
        if kind == "safetensors":
            file.unlink()
            file = Path(shutil.copy(folder / "model.safetensors", path))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=file.name):
        read(path)


def test_missing_shard_is_named(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_with(tiny("llama"), tmp_path / "copy", SAVERS["sharded safetensors"])
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"1 of 3 weight files are missing, for example model-1\.safetensors"):
        read(folder)


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}']
)
def test_damaged_index_is_named(tiny: Tiny, tmp_path: Path, text: str) -> None:
    folder = copy_with(tiny("llama"), tmp_path / "copy", lambda state, folder: None)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        read(folder)


def test_an_index_without_a_map_says_so(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_with(tiny("llama"), tmp_path / "copy", lambda state, folder: None)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="it holds no weight_map"):
        read(folder)


def test_a_file_of_something_else_is_no_number(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_with(tiny("llama"), tmp_path / "copy", lambda state, folder: None)
    (folder / "pytorch_model.bin").write_bytes(b"junk" * 100)
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: damaged, or holds other objects"):
        read(folder)


def test_no_weights_at_all(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no weights found"):
        read(copy_with(tiny("llama"), tmp_path / "copy", lambda state, folder: None))


def test_pickled_code_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_with(tiny("llama"), tmp_path / "copy", lambda state, folder: None)
    torch.save({"a": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="other objects than tensors"):
        read(folder)


def test_undecodable_quantisation_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    type_ = gguf.GGMLQuantizationType.Q8_1
    writer.add_tensor("token_embd.weight", np.zeros((2, 40), np.uint8), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = SimpleNamespace(dtype="float32", quantization="stored")
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight is of type Q8_1"):
        list(ksana_iter_weights(tmp_path / "m.gguf", config) or ())  # type: ignore[arg-type]
