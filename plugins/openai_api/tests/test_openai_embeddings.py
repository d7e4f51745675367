"""Embeddings as the OpenAI client gets them from a real engine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

from ksana.engine.async_engine import AsyncEngine
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.testing.live_server import live_server
from ksana.testing.tiny_models import tiny_model
from ksana.types.config import CacheConfig, KernelConfig, KsanaConfig, ModelOptions, SchedulerConfig
from ksana_openai_api import plugin

pytestmark = pytest.mark.timeout(60)

TEXTS = ["The quick brown fox", "What is the capital of France?", "über"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that pools by the mean."""
    folder = tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return folder


@pytest.fixture(scope="module")
def real_client(model_path: Path) -> Iterator[openai.OpenAI]:
    config = KsanaConfig(
        model=ModelOptions(model=str(model_path), served_model_name="tiny"),
        scheduler=SchedulerConfig(split_fuse_token_num=4, max_waiting_queue_len=20),
        cache=CacheConfig(num_blocks=128),
        kernel=KernelConfig(threads=1),
    )
    engine = AsyncEngine.start(config, create_plugin_manager(PluginSpecs(autoload=False)))
    with live_server(engine, plugin) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asyncio.run(engine.stop("the tests are done"))


def expected(path: Path, texts: list[str], dimensions: int = 64) -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    vectors = np.array([rows.mean(dim=0)[:dimensions].numpy() for rows in states])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_vectors_are_those_of_transformers(real_client: openai.OpenAI, model_path: Path, encoding: Any) -> None:
    """The client asks for base64 by itself if nothing is said, and decodes it."""
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = real_client.embeddings.create(model="tiny", input=TEXTS, **options)
    vectors = [item.embedding for item in answer.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(text), dtype="<f4") for text in vectors]
    np.testing.assert_allclose(np.array(vectors), expected(model_path, TEXTS), atol=1e-4)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_texts_and_token_ids_alone_and_in_lists(real_client: openai.OpenAI) -> None:
    tokens = real_client.post("/tokenize", body={"prompt": TEXTS[0]}, cast_to=object)["tokens"]  # type: ignore[index]
    inputs: list[Any] = [TEXTS[0], [TEXTS[0]], tokens, [tokens]]
    answers = [real_client.embeddings.create(model="tiny", input=each) for each in inputs]
    assert all(answer.data[0].embedding == answers[0].data[0].embedding for answer in answers)
    assert {answer.usage.prompt_tokens for answer in answers} == {len(tokens)}


def test_fewer_dimensions_have_unit_length(real_client: openai.OpenAI, model_path: Path) -> None:
    answer = real_client.embeddings.create(model="tiny", input=TEXTS, dimensions=7)
    vectors = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(vectors, expected(model_path, TEXTS, 7), atol=1e-4)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, None, "input"),
        ({"input": ""}, 400, None, "input"),
        ({"input": []}, 400, None, "input"),
        ({"input": ["a", 1]}, 400, None, "input[1]"),
        ({"input": [[1], ["a"]]}, 400, None, "input[1][0]"),
        ({"input": ["a"] * 21}, 400, None, "input"),
        ({"input": [512]}, 400, None, "input"),
        ({"input": "word " * 600}, 400, "context_length_exceeded", "input"),
        ({"input": "a", "dimensions": 0}, 400, None, "dimensions"),
        ({"input": "a", "dimensions": 65}, 400, None, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, None, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 8}, 400, "unsupported_parameter", "truncate_prompt_tokens"),
        ({"input": "a", "model": "other"}, 404, "model_not_found", "model"),
    ],
)
def test_errors_have_the_shape_of_openai(
    real_client: openai.OpenAI, body: dict[str, Any], status: int, code: str | None, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        real_client.post("/embeddings", body=body, cast_to=object)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (status, code, param)
