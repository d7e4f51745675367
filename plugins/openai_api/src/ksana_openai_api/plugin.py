"""What Ksana finds through the entry point: the routes, and nothing loaded before they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

    from ksana.config.options import OptionRegistry
    from ksana.engine.async_engine import AsyncEngine
    from ksana.plugin.manager import KsanaPluginManager
    from ksana.text.parsing import ReasoningParserInfo, ToolParserInfo
    from ksana.types.config import KsanaConfig

ksana_api = 1


@hookimpl
def ksana_addoption(options: OptionRegistry) -> None:
    """Add the options of chat answers and of responses."""
    from ksana_openai_api.parser_options import add_parser_options
    from ksana_openai_api.responses.options import add_store_options

    add_parser_options(options)
    add_store_options(options)


@hookimpl
def ksana_configure(config: KsanaConfig, pluginmanager: KsanaPluginManager) -> None:
    """Load the operator's parser file and see whether the chosen parsers are there."""
    from ksana_openai_api.output_parsers import ChatParsers, load_parser_file

    load_parser_file(config, pluginmanager)
    ChatParsers.choose(config, pluginmanager)


@hookimpl
def ksana_tool_parsers(register: Callable[[ToolParserInfo], None]) -> None:
    """Register the formats of the models that are in wide use."""
    from ksana_openai_api.tool_parsers import TOOL_PARSERS

    for info in TOOL_PARSERS:
        register(info)


@hookimpl
def ksana_reasoning_parsers(register: Callable[[ReasoningParserInfo], None]) -> None:
    """Register the reasoning of DeepSeek and Qwen models."""
    from ksana_openai_api.reasoning_parsers import REASONING_PARSERS

    for info in REASONING_PARSERS:
        register(info)


@hookimpl
def ksana_register_routes(app: web.Application, engine: AsyncEngine, config: KsanaConfig) -> None:
    """Add the routes of the OpenAI API."""
    from ksana_openai_api.chat import ChatCompletions
    from ksana_openai_api.completions import Completions
    from ksana_openai_api.embeddings import Embeddings
    from ksana_openai_api.models import Models
    from ksana_openai_api.output_parsers import ChatParsers
    from ksana_openai_api.responses.handler import Responses
    from ksana_openai_api.responses.store import ResponseStore
    from ksana_openai_api.tokenize import Tokenization

    parsers = ChatParsers.choose(config, engine.plugin_manager)
    app.router.add_post("/v1/chat/completions", ChatCompletions(engine, parsers).handle)
    app.router.add_post("/v1/completions", Completions(engine).handle)
    app.router.add_post("/v1/embeddings", Embeddings(engine).handle)
    Responses(engine, parsers, ResponseStore.of(config)).add_routes(app.router)
    models, tokenization = Models(engine), Tokenization(engine)
    app.on_cleanup.append(tokenization.close)
    for prefix in ("/v1", ""):
        app.router.add_post(f"{prefix}/tokenize", tokenization.tokenize)
        app.router.add_post(f"{prefix}/detokenize", tokenization.detokenize)
        app.router.add_get(f"{prefix}/models", models.list)
        # A hub name has a slash in it.
        app.router.add_get(f"{prefix}/models/{{model_id:.+}}", models.get)
