"""POST /forward answers what transformers computes, in the wire format of the original engine."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
import torch
import transformers

from ksana.engine.async_engine import AsyncEngine
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.server import answer_budget, forward
from ksana.types.config import CacheConfig, KernelConfig, KsanaConfig, ModelOptions, SchedulerConfig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

TOKENS = [5 + 7 * i % 50 for i in range(45)]
HIDDEN_SIZE, VOCAB_SIZE, MAX_NUM_SEQS = 64, 512, 4


def start_engine(path: Path, **model: Any) -> AsyncEngine:
    """Small enough that requests take turns, and prompts come in pieces."""
    config = KsanaConfig(
        model=ModelOptions(model=str(path), served_model_name="tiny", **model),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, split_fuse_token_num=7, launch_block_threshold=1),
        cache=CacheConfig(num_blocks=24, check_integrity=True),
        kernel=KernelConfig(threads=1),
    )
    return AsyncEngine.start(config, create_plugin_manager(PluginSpecs(autoload=False)))


@pytest.fixture(scope="module")
def real_engine(tiny_path: Callable[..., Path]) -> Iterator[AsyncEngine]:
    engine = start_engine(tiny_path(), dtype="float32")
    yield engine
    asyncio.run(engine.stop("the tests are done"))


@pytest.fixture(scope="module")
def reference(tiny_path: Callable[..., Path]) -> dict[str, np.ndarray]:
    """What transformers has at each position of ``TOKENS``, by the name of the target."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    kept: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    with torch.inference_mode():
        answer = model(torch.tensor([TOKENS]), output_hidden_states=True)
    return {
        "transformer": kept[0][0].numpy(),
        "layernorm": answer.hidden_states[-1][0].numpy(),
        "logits": answer.logits[0].numpy(),
        "probabilities": answer.logits[0].softmax(-1).numpy(),
    }


def target(name: str, *slices: list[int], **fields: Any) -> dict[str, Any]:
    return {"target_name": name, "token_reduce_mode": "GATHER_ALL", "slice_pos": list(slices), **fields}


def probabilities(*slices: list[int], top: int = 0) -> dict[str, Any]:
    return target("logits", *slices, token_reduce_mode="GATHER_TOKEN_ID", input_top_logprobs_num=top)


def prompt(*targets: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"input_tokens": TOKENS, "request_target": list(targets), **fields}


async def post(session: aiohttp.ClientSession, *prompts: dict[str, Any]) -> list[dict[str, Any]]:
    async with session.post("/forward", json={"requests": list(prompts)}) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert (answer["code"], answer["message"]) == (0, "OK")
        responses: list[dict[str, Any]] = answer["responses"]
        return responses


def tensor(response: dict[str, Any], name: str) -> np.ndarray:
    [found] = [each["tensor"] for each in response["response"] if each["target_name"] == name]
    data = base64.b64decode(found["data"])
    if found["dtype"] == "bfloat16":
        elements = (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
    else:
        elements = np.frombuffer(data, dtype=found["dtype"])
    return elements.reshape(found["shape"])


async def test_targets_equal_transformers_beside_requests_that_generate(
    serving, real_engine: AsyncEngine, reference: dict[str, np.ndarray]
) -> None:
    """More requests than seats and blocks, the same prompt several times, and texts that grow beside them."""
    wanted = prompt(target("transformer", [-45, 2], [40, 44]), target("layernorm", [-1, -1]), target("logits", [3, 6]))
    scored = prompt(probabilities([0, 44], top=3))
    plain = {"input_tokens": TOKENS[:-1], "sampling_config": {"max_new_tokens": 120, "ignore_eos": True}}

    async def generate(session: aiohttp.ClientSession) -> list[int]:
        async with session.post("/generate", json={**plain, "stream": False}) as response:
            return (await response.json())["output_token_ids"][0]

    async with serving(real_engine) as session:
        alone = await generate(session)
        before = real_engine.snapshot().preemptions
        texts, answers = await asyncio.gather(
            asyncio.gather(*(generate(session) for _ in range(4))),
            asyncio.gather(*(post(session, wanted, scored, wanted) for _ in range(4))),
        )
    assert real_engine.snapshot().preemptions > before
    assert texts == [alone] * 4
    for first, scores, again in answers:
        assert first == again
        assert first["input_token_ids"] == TOKENS
        assert first["input_top_logprobs"] == []
        rows = [0, 1, 2, 40, 41, 42, 43, 44]
        np.testing.assert_allclose(tensor(first, "transformer"), reference["transformer"][rows], atol=2e-4)
        np.testing.assert_allclose(tensor(first, "layernorm"), reference["layernorm"][[44]], atol=2e-4)
        np.testing.assert_allclose(tensor(first, "logits"), reference["logits"][3:7], atol=2e-4)
        found, expected = tensor(scores, "logits"), reference["probabilities"]
        assert (found.shape, found.dtype) == ((45,), np.float32)
        np.testing.assert_allclose(found, expected[np.arange(45), [*TOKENS[1:], 0]], rtol=1e-3)
        for position, top in enumerate(scores["input_top_logprobs"]):
            assert [pair[0] for pair in top] == list(np.argsort(-expected[position])[:3])
            np.testing.assert_allclose([pair[1] for pair in top], np.log(expected[position][[p[0] for p in top]]), 1e-3)


async def test_perplexity_as_clients_of_the_original_compute_it(
    serving, real_engine: AsyncEngine, reference: dict[str, np.ndarray]
) -> None:
    prefix = 10
    async with serving(real_engine) as session:
        [response] = await post(session, prompt(probabilities([prefix, len(TOKENS) - 2])))
    scored = tensor(response, "logits")
    loss = [-np.log(reference["probabilities"][i, TOKENS[i + 1]]) for i in range(prefix, len(TOKENS) - 1)]
    assert 2 ** -np.mean(np.log2(scored)) == pytest.approx(np.exp(np.mean(loss)), rel=1e-3)


async def test_token_ids_select_positions_in_order(
    serving, real_engine: AsyncEngine, reference: dict[str, np.ndarray]
) -> None:
    by_ids = target("transformer", token_id=[TOKENS[3], TOKENS[1], 511])
    rows = [position for position, token in enumerate(TOKENS) if token in (TOKENS[1], TOKENS[3])]
    async with serving(real_engine) as session:
        [response] = await post(session, prompt(by_ids))
    np.testing.assert_allclose(tensor(response, "transformer"), reference["transformer"][rows], atol=2e-4)


async def test_nothing_selected_is_no_rows_and_of_equal_names_the_first_counts(
    serving, real_engine: AsyncEngine
) -> None:
    nothing = [{"target_name": "transformer"}, target("layernorm", token_id=[511]), target("logits"), probabilities()]
    async with serving(real_engine) as session:
        first, second, third = await post(
            session, prompt(*nothing), prompt(probabilities(top=1)), {"prompt": "The quick brown fox"}
        )
    assert [(each["target_name"], each["tensor"]["shape"]) for each in first["response"]] == [
        ("transformer", [0, HIDDEN_SIZE]),
        ("layernorm", [0, HIDDEN_SIZE]),
        ("logits", [0, VOCAB_SIZE]),
    ]
    assert second["response"][0]["tensor"]["shape"] == [0]
    assert third["response"] == []
    assert third["input_token_ids"] == real_engine.tokenizer.encode("The quick brown fox")


async def test_refit_embeddings_replace_those_of_tokens(
    serving, tiny_path: Callable[..., Path], real_engine: AsyncEngine
) -> None:
    """vllm#6521 is of this kind: the same tokens with other embeddings must not be found in the cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32)
    own = model.get_input_embeddings().weight[TOKENS[8]].tolist()
    placeholder = [*TOKENS[:8], 400, *TOKENS[9:]]
    wanted = {"request_target": [target("transformer", [40, 44])]}
    refit = {"input_refit_embedding": {"pos": [8], "embeddings": [own]}}
    async with serving(real_engine) as session:
        plain, other, refitted = await post(
            session,
            {"input_tokens": TOKENS, **wanted},
            {"input_tokens": placeholder, **wanted},
            {"input_tokens": placeholder, **wanted, **refit},
        )
    assert (tensor(other, "transformer") != tensor(plain, "transformer")).any()
    np.testing.assert_array_equal(tensor(refitted, "transformer"), tensor(plain, "transformer"))


@pytest.mark.parametrize("content_type", [None, "application/x-msgpack", "application/msgpack; charset=binary"])
async def test_messagepack_and_json_say_the_same(serving, real_engine: AsyncEngine, content_type: str | None) -> None:
    body = {"requests": [prompt(target("logits", [0, 1])), {"prompt": "Überall", "request_target": []}]}
    headers = {} if content_type is None else {"Content-Type": content_type}
    async with serving(real_engine) as session:
        as_json = await post(session, *body["requests"])
        data = msgpack.packb(body)
        async with session.post("/forward", data=data, headers=headers, skip_auto_headers=["Content-Type"]) as response:
            assert response.status == 200
            assert response.content_type == "application/x-msgpack"
            packed = msgpack.unpackb(await response.read())
        async with session.post(
            "/forward", json=body, headers={"Content-Type": "application/json; charset=utf-8"}
        ) as response:
            assert response.content_type == "application/json"
            assert (await response.json())["responses"] == as_json
    found = packed["responses"][0]["response"][0]["tensor"]
    assert isinstance(found["data"], bytes)
    found["data"] = found["data"].decode()
    assert packed["responses"] == as_json


async def test_rows_have_the_dtype_of_the_model(serving, tiny_path: Callable[..., Path]) -> None:
    engine = start_engine(tiny_path(), dtype="bfloat16")
    try:
        async with serving(engine) as session:
            [response] = await post(session, prompt(target("transformer", [0, 44]), probabilities([0, 44])))
    finally:
        await engine.stop("done")
    dtypes = [each["tensor"]["dtype"] for each in response["response"]]
    assert dtypes == ["bfloat16", "float32"]
    assert tensor(response, "transformer").shape == (45, HIDDEN_SIZE)


@pytest.mark.parametrize(
    ("field", "text", "param"),
    [
        ({}, "Missing 'target_name'", "target_name"),
        ({"target_name": "hidden"}, "Invalid target name 'hidden'", "target_name"),
        ({"target_name": "lm_head"}, "not supported", "target_name"),
        (target("logits", [0, 1], cutoff_layer=[3]), "not supported", "cutoff_layer"),
        (target("logits", [3, 2]), "ends before it starts", "slice_pos[0]"),
        (target("logits", [-1, -2]), "ends before it starts", "slice_pos[0]"),
        (target("logits", [0, 45]), "exceeds the 45 tokens", "slice_pos[0]"),
        (target("logits", [-46, 0]), "exceeds the 45 tokens", "slice_pos[0]"),
        (target("logits", [0, 2**62]), "exceeds the 45 tokens", "slice_pos[0]"),
        (target("logits", [0, 3], [3, 4]), "overlaps", "slice_pos[1]"),
        (target("logits", [5, 6], [1, 2]), "overlaps", "slice_pos[1]"),
        (target("logits", [1]), "at least 2 items", "slice_pos[0]"),
        (target("transformer", [0, 1], token_id=[5]), "at the same time", "token_id"),
        (target("logits", token_id=[5]), "takes slice_pos, not token_id", "token_id"),
        (target("logits", [0, 1], token_reduce_mode=""), "Invalid token_reduce_mode ''", "token_reduce_mode"),
        (target("layernorm", [0, 1], token_reduce_mode="GATHER_TOKEN_ID"), "does not support", "token_reduce_mode"),
        (probabilities([0, 1], top=-1), "must be from 0", "input_top_logprobs_num"),
        (probabilities([0, 1], top=21), "must be from 0", "input_top_logprobs_num"),
        (target("logits", [0, 1], input_top_logprobs_num=1), "GATHER_TOKEN_ID", "input_top_logprobs_num"),
        (target("logits", [0, 1], slices=[]), "not permitted", "slices"),
    ],
)
async def test_impossible_targets_name_the_field(
    serving, real_engine: AsyncEngine, field: dict[str, Any], text: str, param: str
) -> None:
    body = {"requests": [prompt(), prompt(target("layernorm", [0, 0]), field)]}
    async with serving(real_engine) as session, session.post("/forward", json=body) as response:
        answer = await response.json()
    assert response.status == 400
    assert text in answer["error"]["message"]
    assert answer["error"]["param"] == f"requests[1].request_target[1].{param}"
    assert answer["ksana_code"] == 2000


@pytest.mark.parametrize(
    ("requests", "param", "code"),
    [
        ([], "requests", 2000),
        ([{}], "requests[0].prompt", 2000),
        ([{"input_tokens": []}], "requests[0].prompt", 2000),
        ([{"prompt": ""}], "requests[0].prompt", 2000),
        ([{"input_tokens": [512]}], "requests[0].input_tokens", 2000),
        ([{"input_tokens": [5] * 512}], "requests[0].input_tokens", 2002),
        ([prompt(input_refit_embedding={"pos": [0]})], "requests[0].input_refit_embedding", 2000),
        (
            [prompt(input_refit_embedding={"pos": [0], "embeddings": [["1"] * 64]})],
            "requests[0].input_refit_embedding.embeddings[0]",
            2000,
        ),
        (
            [prompt(input_refit_embedding={"pos": [45], "embeddings": [[1] * 64]})],
            "requests[0].input_refit_embedding",
            2000,
        ),
        ([prompt(target("logits", [0, 4]))], "requests[0].request_target[0].slice_pos", 2002),
        ([prompt()] * 1201, "requests", 2000),
    ],
)
async def test_impossible_prompts_name_the_field(
    serving, real_engine: AsyncEngine, requests: list[dict[str, Any]], param: str, code: int
) -> None:
    async with serving(real_engine) as session, session.post("/forward", json={"requests": requests}) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["param"], answer["ksana_code"]) == (400, param, code), answer


@pytest.mark.parametrize(
    ("content_type", "data", "status", "text"),
    [
        ("application/x-msgpack", b"", 400, "Request content is empty."),
        ("application/json", b"", 400, "Json Request content is empty."),
        ("application/x-msgpack", b"\x91", 400, "Failed to unpack the request bytes"),
        ("application/x-msgpack", b"\xc1", 400, "Failed to unpack the request bytes"),
        ("application/x-msgpack", b"\x91" * 5000 + b"\xc0", 400, "Failed to unpack the request bytes"),
        ("application/x-msgpack", b"\x81\xa1\xff\xc0", 400, "Failed to unpack the request bytes"),
        ("application/x-msgpack", b"\x81\x01\x02", 400, "Failed to unpack the request bytes"),
        ("application/x-msgpack", b"\x81\xa1a\xc7\x01\x05x", 400, "Failed to unpack the request bytes: an extension"),
        ("application/x-msgpack", b"\xdd\x00\x0f\xff\xff" + b"\x90" * (2**20 - 1), 400, "lists and maps"),
        ("application/x-msgpack", b"\x90", 400, "must be"),
        ("application/json", b"{", 400, "not valid JSON"),
        ("text/plain", b"{}", 415, "is not supported"),
    ],
)
async def test_damaged_bodies_are_refused(
    serving, real_engine: AsyncEngine, content_type: str, data: bytes, status: int, text: str
) -> None:
    headers = {"Content-Type": content_type}
    async with serving(real_engine) as session, session.post("/forward", data=data, headers=headers) as response:
        answer = await response.json()
    assert response.status == status
    assert text in answer["error"]["message"]


async def test_answers_that_would_fill_the_memory_are_refused_before_they_are_made(
    serving, real_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = HIDDEN_SIZE * 4
    budget = answer_budget.AnswerBudget(max_answer=60 * row, max_held=100 * row)
    monkeypatch.setattr(forward, "AnswerBudget", lambda: budget)
    many, one = prompt(target("transformer", [0, 44])), prompt(target("layernorm", [0, 0]))
    async with serving(real_engine) as session:
        async with session.post("/forward", json={"requests": [many, many]}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "answer_too_large"
        assert budget.held == 0
        with budget.answer() as take:
            take(60 * row)
            async with session.post("/forward", json={"requests": [many]}) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert await post(session, one)
        assert await post(session, many)
    assert budget.held == 0


async def test_a_client_that_leaves_gives_its_share_back(serving, real_engine: AsyncEngine) -> None:
    async with serving(real_engine) as session:
        waiting = [asyncio.create_task(post(session, *[prompt(target("transformer", [0, 44]))] * 8)) for _ in range(3)]
        while real_engine.num_unfinished() < 8:
            await asyncio.sleep(0.001)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        while real_engine.num_unfinished():
            await asyncio.sleep(0.01)
        assert await post(session, prompt(target("layernorm", [0, 44])))
