"""The Python examples of docs/plugins.md work as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from ksana.config.compose import compose_config
from ksana.config.options import collect_options
from ksana.config.settings import Setting
from ksana.errors import UsageError
from ksana.plugin.manager import KsanaPluginManager
from ksana.plugin.model_dir import ModelDirPlugin, register_model_dir_plugin
from ksana.plugin.output_parsers import collect_tool_parsers
from ksana.testing.kv_connector_tests import KVConnectorTests, MakeConnector
from ksana.testing.output_parser import check_output_parser, parse_pieces
from ksana.text.parsing import ParserContext

TEXT = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def block_with(words: str) -> str:
    (block,) = [block for block in BLOCKS if words in block]
    return block


def as_plugin(source: str, name: str = "example") -> KsanaPluginManager:
    module = ModuleType(name)
    exec(compile(source, name, "exec"), vars(module))
    manager = KsanaPluginManager()
    manager.register(module)
    manager.check_pending()
    return manager


@pytest.mark.parametrize("block", [block for block in BLOCKS if "class KsanaPlugin" not in block])
def test_every_module_example_registers(block: str) -> None:
    assert as_plugin(block).list_name_plugin()


def test_the_options_example_is_validated_and_checked() -> None:
    manager = as_plugin(block_with("ksana_addoption"))
    options = collect_options(manager)
    path = ("plugin_options", "greeter", "repeat")
    composed = compose_config(None, {"KSANA_GREETER_STYLE": "warm"}, {path: Setting("0", "--greeter-repeat")}, options)
    assert composed.config.plugin_options == {"greeter": {"style": "warm", "repeat": 0}}
    with pytest.raises(UsageError, match="--greeter-repeat must be at least 1"):
        manager.configure(composed.config)


def test_the_model_folder_example_loads(tmp_path: Path) -> None:
    file = tmp_path / "ksana_plugin.py"
    file.write_text(block_with("class KsanaPlugin"))
    manager = KsanaPluginManager()
    register_model_dir_plugin(manager, ModelDirPlugin(file))
    assert manager.get_plugin("model-folder").suffix == " Answer briefly."


def test_the_parser_example_reads_calls() -> None:
    parsers = collect_tool_parsers(as_plugin(block_with("ksana_tool_parsers")))
    text = 'Well.\nCALL now\nCALL add {"a": 1}'
    check_output_parser(lambda: parsers["lines"].create(ParserContext()), [text])
    answer = parse_pieces(parsers["lines"].create(ParserContext()), [text])
    assert answer.content == "Well.\n"
    assert [(call.name, call.arguments) for call in answer.calls] == [("now", "{}"), ("add", '{"a": 1}')]


class TestTheConnectorExample(KVConnectorTests):
    shares_store = False

    @pytest.fixture
    def make_connector(self) -> MakeConnector:
        hook = as_plugin(block_with("class AtticStore")).hook
        return lambda context: hook.ksana_create_kv_connector(name="attic", context=context)
