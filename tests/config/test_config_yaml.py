"""The YAML file: our keys, the original engine's keys, and mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ksana.config.compose import compose_config
from ksana.config.options import OptionRegistry
from ksana.config.settings import PLUGIN_OPTIONS, core_fields
from ksana.config.yaml_file import read_yaml
from ksana.config.yaml_keys import ORIGINAL_KEYS, MappedKey, RefusedKey
from ksana.errors import ConfigError
from ksana.types.config import KsanaConfig

ORIGINAL = """
setting:
  global: {tensor_para_size: 1, pipeline_para_size: 1}
  batch_scheduler:
    schedule_strategy: 0
    waiting_timeout_in_ms: 1500
    max_waiting_queue_len: 7
    max_token_len: 100
    max_step_tokens: 256
    max_batch_size: 3
    split_fuse_token_num: 32
    enable_async: true
    enable_auto_prefix_cache: false
    swapout_block_threshold: 1.5
    swapin_block_threshold: 3.0
    launch_block_threshold: 2.0
    preempt_mode: 1
    swap_threadpool_size: 4
  block_manager:
    {block_token_num: 8, block_device_memory_ratio: 0.25, block_host_memory_factor: 2.0, host_pool_size_gb: 1}
  tokenization: {tokenizer_path: ./tok, add_special_tokens: true}
  profiler:
    metrics_export_url: http://collector:4318/v1/metrics
    export_interval_millis: 30000
    export_timeout_millis: 500
    attributes: {zone: north, rack: 7}
  connector: {group_role: none}
model_spec:
  base_model: {model_dir: ./model}
  plugin_model: {enable_tensorrt: true, plugin_thread_pool_size: 4, trust_remote_code: true}
"""


def compose(tmp_path: Path, text: str) -> KsanaConfig:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    return compose_config(read_yaml(str(file)), {}, {}, OptionRegistry()).config


def test_a_file_of_the_original_engine_is_understood(tmp_path: Path) -> None:
    config = compose(tmp_path, ORIGINAL)
    assert config.scheduler.model_dump() == {
        "waiting_timeout_s": 1.5,
        "max_waiting_queue_len": 7,
        "max_model_len": 100,
        "max_num_batched_tokens": 256,
        "max_mixed_prefill_tokens": 128,
        "long_prefill_token_threshold": 256,
        "max_num_seqs": 3,
        "split_fuse_token_num": 32,
        "policy": "fcfs",
        "enable_async": True,
        "preempt_mode": "recompute",
        "swapout_block_threshold": 1.5,
        "swapin_block_threshold": 3.0,
        "launch_block_threshold": 2.0,
    }
    cache = config.cache
    assert (cache.host_memory_factor, cache.host_max_bytes, cache.swap_threads) == (2.0, 2**30, 4)
    assert (config.cache.block_size, config.cache.memory_fraction, config.cache.enable_prefix_caching) == (
        8,
        0.25,
        False,
    )
    assert (config.model.model, config.model.tokenizer) == ("./model", "./tok")
    assert (config.model.plugin_thread_pool_size, config.model.trust_remote_code) == (4, True)
    telemetry = config.telemetry
    assert telemetry.otlp_endpoint == "http://collector:4318"
    assert (telemetry.otlp_interval_s, telemetry.otlp_timeout_s) == (30.0, 0.5)
    assert telemetry.otlp_attributes == ("zone=north", "rack=7")
    assert config.config_file == str(tmp_path / "serve.yaml")


def test_both_spellings_of_the_thread_pool_size_and_automatic_memory(tmp_path: Path) -> None:
    text = (
        "model_spec: {plugin_model: {thread_pool_size: 5}}\nsetting: {block_manager: {block_device_memory_ratio: -1}}"
    )
    config = compose(tmp_path, text)
    assert config.model.plugin_thread_pool_size == 5
    assert config.cache.memory_fraction == KsanaConfig().cache.memory_fraction


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("enable_speculative_decoding: true", "trie"),
        ("{enable_speculative_decoding: true, speculative_method: trie}", "trie"),
        ("{enable_speculative_decoding: false, speculative_method: trie}", "none"),
    ],
)
def test_speculative_decoding_is_switched_on_by_the_original_s_key(tmp_path: Path, text: str, method: str) -> None:
    text = f"setting:\n  batch_scheduler:\n    {text}\n"
    assert compose(tmp_path, text).speculation.method == method


def test_our_own_sections_and_the_original_ones_mix(tmp_path: Path) -> None:
    config = compose(tmp_path, "server: {port: 9000}\nsetting: {batch_scheduler: {max_batch_size: 2}}\nmodel:\n")
    assert (config.server.port, config.scheduler.max_num_seqs) == (9000, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("setting: {global: {tensor_para_size: 2}}", "setting.global.tensor_para_size: 2 is not available: tensor par"),
        ("setting: {connector: {group_role: prefill}}", "setting.connector: .*separate nodes"),
        ("setting: {quantization_config: {weight: {quant_method: fp8_e4m3}}}", "quant_method: 'fp8_e4m3' is not av"),
        ("setting: {batch_scheduler: {max_batch_sise: 2}}", "unknown key .*did you mean .*max_batch_size"),
        ("setting: {max_batch_size: 2}", "did you mean setting.batch_scheduler.max_batch_size"),
        ("sever: {port: 1}", "unknown key sever"),
        ("server: {prot: 1}", "unknown key server.prot; did you mean server.port"),
        ("port: 1", "did you mean server.port"),
        ("1: 2", "unknown key 1"),
        ("server: 8080", "server must hold keys of its own, not 8080"),
        ("server: [1]", "server must hold keys"),
        ("server: {port: }", "server.port has no value"),
        ("server: {port: [1]}", r"server.port: \[1\] is not valid: must be a valid integer"),
        ("server: {port: true}", "server.port: True is not valid"),
        ("server: {port: 70000}", "70000 is not valid: must be less than or equal to 65535"),
        ("model: {dtype: int8}", "'int8' is not valid: must be 'auto', 'bfloat16', 'float16' or 'float32'"),
        ("server: {port: 1}\nserver: {host: x}", "line 2: the key 'server' appears twice"),
        ("scheduler: {max_num_seqs: 1}\nsetting: {batch_scheduler: {max_batch_size: 2}}", "sets the same as"),
        ("setting: {batch_scheduler: {waiting_timeout_in_ms: soon}}", "'soon' is not valid: must be a number of milli"),
        ("setting: {block_manager: {host_pool_size_gb: .inf}}", "inf is not valid: must be a number of gigabytes"),
        ("setting: {block_manager: {host_pool_size_gb: .nan}}", "nan is not valid: must be a number of gigabytes"),
        ("setting: {block_manager: {host_pool_size_gb: -1}}", "-1 is not valid: must be a number of gigabytes"),
        ("scheduler: {max_num_seqs: 1000000}", "must be less than or equal to 65536"),
        ("setting: {batch_scheduler: {speculative_method: asr_custom}}", "'asr_custom' is not av"),
        ("setting: {batch_scheduler: {enable_speculative_decoding: 1}}", "1 is not valid: must be true or false"),
        ("- a\n- b", "must hold a mapping"),
        ("just words", "must hold a mapping"),
        ("a: [", "line 1"),
        ("a: !!python/object/apply:os.system [ls]", "line 1: could not determine a constructor"),
        ("? [a]\n: 1", "serve.yaml"),
        ("plugin_options: {nobody: {x: 1}}", "no loaded plugin has the option plugin_options.nobody.x"),
        ("plugin_options: {nobody: 1}", "plugin_options.nobody must hold keys"),
        ("plugins: {plugins: {a: 1}}", "must be a list of plugin names"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        compose(tmp_path, text)
    assert "serve.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", "folder"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | str | None) -> None:
    file = tmp_path / "c.yaml"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "folder":
        file.mkdir()
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        read_yaml(str(file))


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert compose(tmp_path, "# nothing\n").server == KsanaConfig().server


def test_every_mapped_key_has_a_field_and_every_refusal_a_reason() -> None:
    for key, entry in ORIGINAL_KEYS.items():
        if isinstance(entry, MappedKey):
            assert entry.path in core_fields() or entry.path[0] == PLUGIN_OPTIONS, key
        else:
            assert isinstance(entry, RefusedKey)
            assert entry.reason, key
