"""``ksana-serve`` as an operator meets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ksana
from ksana.cli.flags import full_parser, normalize, settings_from_flags
from ksana.cli.serve import COMMAND, main
from ksana.config.options import OptionRegistry
from ksana.config.settings import core_fields

ROOT = Path(ksana.__file__).parents[1]
OPTION_PLUGIN = """
from ksana import hookimpl

@hookimpl
def ksana_addoption(options):
    options.add("greeter", "style", str, default="50% plain", help="tone, 100% yours")
    options.add("greeter", "loud", bool, default=False, help="shout")
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("KSANA_", "KLLM_"))]:
        monkeypatch.delenv(name)


def run(*arguments: str, path: Path | None = None, code: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *([path] if path else [])]))}
    command = [sys.executable, *(["-c", code] if code else ["-m", "ksana.cli.serve"]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)


# In a process of its own: what is imported, exit codes, tracebacks


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plugins"], ["--model", "x", "--print-config"]])
def test_commands_that_run_no_model_load_no_heavy_library(arguments: list[str]) -> None:
    code = (
        "import sys; from ksana.cli.serve import main; status = main(sys.argv[1:]); "
        "print('LOADED', status, sorted({'torch', 'transformers', 'aiohttp', 'numpy'} & set(sys.modules)))"
    )
    result = run(*arguments, code=code)
    assert result.stdout.splitlines()[-1] == "LOADED 0 []", result.stdout + result.stderr


@pytest.mark.parametrize("module", ["ksana", "ksana.hookspecs", "ksana.plugin.spec", "ksana.config.compose"])
def test_light_modules_stay_light(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'aiohttp'}} & set(sys.modules)))"
    assert run(code=code).stdout.strip() == "[]"


def test_a_usage_error_is_one_line_and_exit_code_2() -> None:
    result = run("--port", "99999")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "ksana-serve: error: --port: '99999' is not valid: must be less than or equal to 65535\n"


def test_an_unexpected_exception_keeps_its_traceback() -> None:
    code = (
        "import sys, ksana.cli.serve as s\n"
        "def broken(*a): raise ZeroDivisionError('ours')\n"
        "sys.modules['ksana.server.run'] = type(sys)('run'); sys.modules['ksana.server.run'].serve = broken\n"
        "sys.exit(s.main(['--model', 'x']))"
    )
    result = run(code=code)
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_interrupting_the_start_is_quiet(write_package: Callable[..., Path]) -> None:
    site = write_package("slow", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    result = run("--model", "x", path=site)
    assert result.returncode == 130
    assert "Traceback" not in result.stderr


def test_a_broken_plugin_stops_the_start_but_not_the_listing(write_package: Callable[..., Path]) -> None:
    site = write_package("cracked", "raise RuntimeError('no device')\n", version="2.5")
    broken = run("--model", "x", path=site)
    assert broken.returncode == 2
    assert re.fullmatch(
        r"ksana-serve: error: .*ksana-cracked 2\.5.*RuntimeError: no device.*-p no:cracked\n", broken.stderr
    )
    listing = run("plugins", path=site)
    assert listing.returncode == 0
    assert re.search(r"cracked +installed +ksana-cracked 2\.5 +cracked_module", listing.stdout)
    assert re.search(r"cpu_backend +essential builtin", listing.stdout)
    disabled = run("plugins", "-p", "no:cracked", path=site)
    assert re.search(r"cracked +disabled", disabled.stdout)
    assert run("--print-config", "-p", "no:cracked", path=site).returncode == 0
    assert run("--version", path=site).returncode == 0


def test_options_of_a_plugin_join_the_command_line(write_package: Callable[..., Path]) -> None:
    site = write_package("greeter", OPTION_PLUGIN)
    help_text = run("--help", path=site).stdout
    assert "--greeter-loud" in help_text
    assert "tone, 100% yours (default: 50% plain)" in help_text
    shown = run("--greeter_style=warm_", "--greeter-loud", "--print-config", path=site).stdout
    assert "    style: warm_  # --greeter-style\n    loud: true  # --greeter-loud\n" in shown
    absent = run("--greeter-style", "x", "--print-config", "--no-plugin-autoload", path=site)
    assert absent.returncode == 2
    assert "unknown flag --greeter-style" in absent.stderr


# In this process


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("ksana-serve: error: ")
    assert message.count("\n") == 1
    return message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["--max_num_seq=1"], "unknown flag --max-num-seq; did you mean --max-num-seqs?"),
        (["some-model"], "a model is given with --model some-model"),
        (["--port"], "--port: expected one argument"),
        (["--dtype", "int3"], "--dtype: 'int3' is not valid: must be 'auto'"),
        (["--no-access-log=1"], "--no-access-log"),
        ([], "no model given"),
        (["-p", "no:nobody"], "there is no plugin 'nobody'"),
        (["--config-file", "absent.yaml"], "cannot read the configuration file absent.yaml"),
        (["plugins", "--model", "x"], "plugins: unexpected '--model'"),
    ],
)
def test_mistakes_are_explained(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in fails(capsys, *arguments)


def test_the_command_line_beats_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("server: {port: 1, host: from-file}\n")
    monkeypatch.setenv("KSANA_SERVER_PORT", "2")
    monkeypatch.setenv("KSANA_CACHE_BLOCK_SIZE", "32")
    assert main(["--config_file", str(file), "--port", "3", "--no-access_log", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "  port: 3  # --port\n" in shown
    assert f"  host: from-file  # {file}: server.host\n" in shown
    assert "  block_size: 32  # environment variable KSANA_CACHE_BLOCK_SIZE\n" in shown
    assert "  access_log: false  # --no-access-log\n" in shown


def test_a_file_may_name_plugins_and_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once, so that ``--config-file /dev/stdin`` and process substitution work."""
    fifo = tmp_path / "c.yaml"
    os.mkfifo(fifo)
    reader = subprocess.Popen(
        [sys.executable, "-m", "ksana.cli.serve", "--config-file", str(fifo), "--print-config"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    fifo.write_text("plugins: {plugins: ['no:native_api']}\n")
    out, _ = reader.communicate(timeout=60)
    assert "plugins: ['no:native_api']" in out


def test_spellings_of_the_original_engine_are_understood() -> None:
    assert normalize(["--config_file=a_b.yaml", "a_b", "-p", "my_plugin"]) == [
        "--config-file=a_b.yaml",
        "a_b",
        "-p",
        "my_plugin",
    ]
    options = OptionRegistry()
    argv = normalize(["--tokenizer_path", "t_k", "--access_log", "--trust_remote_code"])
    settings = settings_from_flags(full_parser(options, COMMAND), argv, options)
    values = {path[1]: setting.value for path, setting in settings.items()}
    assert values == {"tokenizer": "t_k", "access_log": True, "trust_remote_code": True}


def test_help_teaches_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "--unknown-flag"]) == 0
    text = capsys.readouterr().out
    for field in core_fields().values():
        assert field.flag.removeprefix("--") in text
        assert field.help, field.path
    assert "examples:" in text
    assert "KSANA_SERVER_PORT" in text


def test_help_of_a_switch_that_turns_off_states_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    # "do not log one line a request (default: on)" reads as if nothing were logged by default.
    assert "(default: on)" not in capsys.readouterr().out


def test_the_listing_of_plugins_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: ksana-serve plugins")


def test_print_config_tells_of_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    # It is the command with which one looks for a setting that has no effect.
    monkeypatch.setenv("KSANA_SERVER_PORTT", "1")
    result = run("--print-config")
    assert result.returncode == 0
    assert "KSANA_SERVER_PORTT means nothing; did you mean KSANA_SERVER_PORT?" in result.stderr


def test_the_package_exports_lazily_what_it_promises() -> None:
    for name in set(ksana.__all__) - {"LLM", "AsyncEngine"}:
        assert getattr(ksana, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        ksana.LLN  # noqa: B018
