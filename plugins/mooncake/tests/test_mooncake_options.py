"""The options: where their values come from, and which do not go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ksana.cli.flags import full_parser, settings_from_flags
from ksana.cli.serve import COMMAND
from ksana.config.compose import compose_config
from ksana.config.options import OptionRegistry
from ksana.config.yaml_file import read_yaml
from ksana.config.yaml_keys import ORIGINAL_KEYS, MappedKey
from ksana.errors import ConfigError, UsageError
from ksana.types.config import KsanaConfig
from ksana_mooncake import plugin
from ksana_mooncake.options import GlobalCacheOptions, check_machine, is_wanted

MakeConfig = Callable[..., KsanaConfig]

ORIGINAL = """
setting:
  batch_scheduler: {scheduler_type: 1}
  global_cache_connector:
    service_endpoint: http://127.0.0.1:8090/metadata
    master_server_addr: 127.0.0.1:50061
    backend_type: mooncake-mock
    protocol: rdma
    rdma_devices: mlx5_0
    role: decode
    timeout_ms: 700
    max_retry: 1
    fetch_thread_num: 2
    global_segment_size: 33554432
    local_buffer_size: 8388608
"""

DEFAULTS = """
setting:
  global_cache_connector:
    service_endpoint: ""
    master_server_addr: 127.0.0.1:50051
    backend_type: mooncake
    protocol: tcp
    rdma_devices: ""
    role: ""
    timeout_ms: 5000
    max_retry: 3
    fetch_thread_num: 4
    global_segment_size: 16777216
    local_buffer_size: 16777216
"""


def compose(
    folder: Path, text: str = "", flags: str = "", environ: Mapping[str, str] = {}, *, installed: bool = True
) -> KsanaConfig:
    """What a start with these sources is configured to."""
    registry = OptionRegistry()
    if installed:
        plugin.ksana_addoption(registry.view_for("mooncake"))
    file = folder / "serve.yaml"
    file.write_text(text)
    settings = settings_from_flags(full_parser(registry, COMMAND), flags.split(), registry)
    return compose_config(read_yaml(str(file)) if text else None, environ, settings, registry).config


def test_the_keys_of_the_original_file(tmp_path: Path) -> None:
    config = compose(tmp_path, ORIGINAL, environ={"ENABLE_GLOBAL_CACHE_HOOK": "1", "MOONCAKE_MASTER_BIN": "/opt/m"})
    assert is_wanted(config)
    options = GlobalCacheOptions.of(config)
    assert str(options.master) == "127.0.0.1:50061"
    assert (options.backend, options.protocol, options.rdma_devices) == ("mooncake-mock", "rdma", "mlx5_0")
    assert (options.role, options.timeout_s, options.max_retry) == ("decode", 0.7, 1)
    assert (options.fetch_thread_num, options.global_segment_size) == (2, 32 << 20)
    assert (options.local_buffer_size, options.master_bin) == (8 << 20, "/opt/m")
    assert options.reads_in_place
    assert not options.starts_master


def test_every_key_that_the_core_passes_on_is_an_option_of_ours(tmp_path: Path) -> None:
    paths = [entry.path for entry in ORIGINAL_KEYS.values() if isinstance(entry, MappedKey)]
    names = [path[2] for path in paths if path[:2] == ("plugin_options", "mooncake")]
    assert len(names) == 11
    assert set(names) <= compose(tmp_path).plugin_options["mooncake"].keys()


def test_defaults_that_a_file_spells_out_are_ours(tmp_path: Path) -> None:
    assert compose(tmp_path, DEFAULTS).plugin_options == compose(tmp_path).plugin_options
    assert not is_wanted(compose(tmp_path, DEFAULTS, environ={"ENABLE_GLOBAL_CACHE_HOOK": "1"}))
    compose(tmp_path, DEFAULTS, installed=False)


def test_without_the_plugin_a_file_that_asks_for_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"setting\.global_cache_connector\.service_endpoint: no loaded plugin"):
        compose(tmp_path, ORIGINAL, installed=False)


@pytest.mark.parametrize(
    ("flags", "hook", "wanted"),
    [
        ("", "1", False),
        ("--mooncake-service-endpoint P2PHANDSHAKE", "", False),
        ("--mooncake-service-endpoint P2PHANDSHAKE", "0", False),
        ("--mooncake-service-endpoint P2PHANDSHAKE", "1", True),
        ("--mooncake-service-endpoint P2PHANDSHAKE --enable-global-cache-hook", "", True),
        ("--kv-connector global_cache", "", True),
    ],
)
def test_the_hook_and_an_endpoint_switch_it_on_or_its_name(
    tmp_path: Path, flags: str, hook: str, wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = compose(tmp_path, flags=flags, environ={"ENABLE_GLOBAL_CACHE_HOOK": hook})
    assert is_wanted(config) == wanted
    plugin.ksana_configure(config)
    names = plugin.ksana_kv_connector_names(config)
    assert [*config.kv_transfer.connectors, *(names or [])] == (["global_cache"] if wanted else [])
    assert ("is missing" in caplog.text) == (not wanted)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--mooncake-master-server-addr here", "--mooncake-master-server-addr 'here' is not valid: must be HOST:PORT"),
        ("--mooncake-master-server-addr :50051", "must be HOST:PORT"),
        ("--mooncake-master-server-addr a:99999", "must be HOST:PORT"),
        ("--mooncake-service-endpoint 127.0.0.1:8090", "must be a URL such as http://HOST:PORT/metadata"),
        ("--mooncake-service-endpoint http://127.0.0.1/metadata", "must be a URL"),
        ("--mooncake-service-endpoint http://me:hush@host/metadata", "--mooncake-service-endpoint '...@host/metadata'"),
        (
            "--mooncake-rpc-port 50052",
            "--mooncake-rpc-port says 50052 and --mooncake-master-server-addr says port 50051",
        ),
        (
            "--mooncake-http-port 8081 --mooncake-service-endpoint http://127.0.0.1:8090/metadata",
            "--mooncake-http-port says 8081 and --mooncake-service-endpoint says port 8090",
        ),
        ("--mooncake-http-port 8081", "--mooncake-http-port says 8081 and --mooncake-service-endpoint says P2PHAND"),
        (
            "--port 8080 --mooncake-http-port 8080 --mooncake-service-endpoint http://127.0.0.1:8080/metadata",
            "the server (--port) and the metadata server (--mooncake-service-endpoint) want the same port 8080",
        ),
        (
            "--port 50051",
            "the server (--port) and the Mooncake master (--mooncake-master-server-addr) want the same port 50051",
        ),
        (
            "--mooncake-service-endpoint http://localhost:50051/metadata",
            "the metadata server (--mooncake-service-endpoint) and the Mooncake master",
        ),
        # Mooncake would refuse these, again and again.
        (
            "--mooncake-global-segment-size 1",
            "--mooncake-global-segment-size 1 is too small: must be 0, or 16MiB or more",
        ),
        ("--mooncake-global-segment-size 16777215", "is too small"),
        ("--mooncake-global-segment-size 100PB", "--mooncake-global-segment-size 100000000000000000 is too large"),
        ("--mooncake-local-buffer-size 100PB", "--mooncake-local-buffer-size 100000000000000000 is too large"),
        (
            "--mooncake-protocol rdma --mooncake-rdma-devices no_1,no_2",
            "--mooncake-rdma-devices no_1,no_2: this machine",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(tmp_path: Path, flags: str, message: str) -> None:
    config = compose(tmp_path, flags=f"--kv-connector global_cache {flags}")
    with pytest.raises(UsageError) as caught:
        plugin.ksana_configure(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--mooncake-rpc-port 50051",
        "--mooncake-http-port 8090 --mooncake-service-endpoint http://127.0.0.1:8090/metadata",
        "--port 0",
        # Ports of other machines are their affair.
        "--port 50051 --mooncake-master-server-addr 192.0.2.1:50051",
        "--mooncake-service-endpoint http://192.0.2.1:8080/metadata",
        # A store within the process listens nowhere.
        "--port 50051 --mooncake-backend-type mooncake-mock",
        "--mooncake-global-segment-size 0 --mooncake-local-buffer-size 0",
        "--mooncake-global-segment-size 16MiB --mooncake-local-buffer-size 1",
    ],
)
def test_what_can_work_is_accepted(tmp_path: Path, flags: str) -> None:
    plugin.ksana_configure(compose(tmp_path, flags=f"--kv-connector global_cache {flags}"))


def test_options_that_nobody_uses_may_say_anything(tmp_path: Path) -> None:
    plugin.ksana_configure(compose(tmp_path, flags="--mooncake-rpc-port 1"))


@pytest.mark.parametrize(
    ("endpoint", "metadata_server"),
    [
        ("P2PHANDSHAKE", "P2PHANDSHAKE"),
        ("http://127.0.0.1:8090/metadata", "P2PHANDSHAKE"),
        ("http://192.0.2.1:8090/metadata", "http://192.0.2.1:8090/metadata"),
    ],
)
def test_no_metadata_server_is_needed_on_this_machine(
    make_config: MakeConfig, endpoint: str, metadata_server: str
) -> None:
    options = GlobalCacheOptions.of(make_config(service_endpoint=endpoint))
    assert options.metadata_server == metadata_server


@pytest.mark.parametrize(
    ("address", "hook", "starts"),
    [("127.0.0.1:50051", True, True), ("127.0.0.1:50051", False, False), ("192.0.2.1:50051", True, False)],
)
def test_a_master_is_started_on_this_machine_alone(
    make_config: MakeConfig, address: str, hook: bool, starts: bool
) -> None:
    config = make_config(service_endpoint="P2PHANDSHAKE", master_server_addr=address, enable_hook=hook)
    assert GlobalCacheOptions.of(config).starts_master == starts


@pytest.mark.parametrize(
    ("devices", "flags", "warned"), [([], "", True), (["mlx5_0"], "", False), (["mlx5_0"], "mlx5_1,mlx5_0", False)]
)
def test_without_an_rdma_device_it_is_said_that_tcp_is_taken(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    devices: list[str],
    flags: str,
    warned: bool,
) -> None:
    monkeypatch.setattr("ksana_mooncake.options._INFINIBAND", tmp_path)
    for name in devices:
        (tmp_path / name).mkdir()
    check_machine(GlobalCacheOptions.of(make_config(protocol="rdma", rdma_devices=flags)))
    assert ("Mooncake takes TCP" in caplog.text) == warned


def test_the_mock_is_not_said_to_be_elsewhere(make_config: MakeConfig) -> None:
    assert "127.0.0.1" not in GlobalCacheOptions.of(make_config(backend_type="mooncake-mock")).name


@pytest.mark.parametrize("value", [-1, 1e26])
@pytest.mark.parametrize("name", ["global_segment_size", "local_buffer_size"])
def test_numbers_in_a_file_that_are_no_sizes_are_refused(make_config: MakeConfig, name: str, value: float) -> None:
    with pytest.raises(UsageError, match="size"):
        check_machine(GlobalCacheOptions.of(make_config(**{name: value})))


@pytest.mark.parametrize("value", ["1GiB", 1 << 30])
def test_sizes_may_have_units(make_config: MakeConfig, value: object) -> None:
    assert GlobalCacheOptions.of(make_config(global_segment_size=value)).global_segment_size == 1 << 30
