"""Gemma 2 and 3 against transformers, in contexts many times the window, and as they are installed and talked to."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from ksana import LLM, SamplingParams
from ksana.testing import TransformersOracle
from ksana.testing.tiny_models import randomize
from ksana.types.output import FinishReason

WINDOW = 16
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
ANSWER = SamplingParams(max_tokens=12, **GREEDY)


def prompts() -> list[list[int]]:
    """Four prompts of ten windows and more; three of them begin with the same six windows."""
    rng = random.Random(11)
    shared = [rng.randrange(3, 500) for _ in range(6 * WINDOW)]
    tails = [[rng.randrange(3, 500) for _ in range(n)] for n in (70, 91, 121, 183)]
    return [*(shared + tail for tail in tails[:3]), tails[3]]


@pytest.fixture
def enable_async() -> bool:
    """Scheduling ahead is no business of a model's."""
    return True


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tiny_path: Callable[..., Path]) -> tuple[Path, TransformersOracle]:
    path = tiny_path(request.param, sliding_window=WINDOW, **MODELS[request.param])
    return path, TransformersOracle(path)


def check(outputs: list[Any], oracle: TransformersOracle) -> None:
    """The likeliest tokens, and as likely as they should be."""
    for output in outputs:
        expected = oracle.output_logits(output).log_softmax(-1)
        assert output.token_ids == expected.argmax(-1).tolist()
        actual = torch.tensor([entry.logprob for entry in output.logprobs])
        torch.testing.assert_close(actual, expected.max(-1).values, rtol=0, atol=2e-4)


@pytest.mark.parametrize("backend", ["cpu", "cpu-torch"])
@pytest.mark.parametrize("chunk", [0, 7])
def test_long_contexts(
    model: tuple[Path, TransformersOracle], start_llm: Callable[..., LLM], backend: str, chunk: int
) -> None:
    """Cold, from the cache, and all at once."""
    path, oracle = model
    llm = start_llm(path, backend=backend, split_fuse_token_num=chunk, block_size=8)
    cold, warm = ([llm.generate(prompt, ANSWER)[0] for prompt in prompts()] for _ in range(2))
    check(cold, oracle)
    check(warm, oracle)
    assert all(output.stats.num_cached_tokens >= len(output.prompt_token_ids) - 8 for output in warm)
    llm = start_llm(path, backend=backend, split_fuse_token_num=chunk, block_size=8)
    check(llm.generate(prompts(), ANSWER), oracle)


@pytest.mark.parametrize("backend", ["cpu", "cpu-torch"])
def test_every_position_of_a_prompt(
    model: tuple[Path, TransformersOracle], start_llm: Callable[..., LLM], backend: str
) -> None:
    path, oracle = model
    prompt = prompts()[2]
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, **GREEDY)
    [output] = start_llm(path, backend=backend, split_fuse_token_num=33).generate(prompt, sampling)
    expected = oracle.logits(prompt).log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    actual = torch.tensor([entry.logprob for entry in output.prompt_logprobs[1:]])
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


def test_preempted_beyond_the_window(model: tuple[Path, TransformersOracle], start_llm: Callable[..., LLM]) -> None:
    path, oracle = model
    few = {"num_blocks": 40, "block_size": 8, "launch_block_threshold": 1}
    llm = start_llm(path, max_model_len=300, split_fuse_token_num=40, **few)
    outputs = llm.generate([prompt[:80] for prompt in prompts()], SamplingParams(max_tokens=60, **GREEDY))
    check(outputs, oracle)
    assert sum(output.stats.num_preemptions for output in outputs) > 0


# -- the text part of a model that sees images ---------------------------------------------------------------------


def write_multimodal(path: Path) -> Path:
    text = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": WINDOW}
    text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    text |= {"max_position_embeddings": 512, "query_pre_attn_scalar": 24}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, dtype="float32")
    model = transformers.Gemma3ForConditionalGeneration(config)
    randomize(model, 5, norms_around=0.0)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("names", ["as saved", "new", "old"])
def test_text_part_of_a_model_that_sees_images(
    tmp_path: Path, tiny_path: Callable[..., Path], start_llm: Callable[..., LLM], names: str
) -> None:
    path = write_multimodal(tmp_path / "model")
    oracle = TransformersOracle(path)
    if names != "as saved":
        prefixes = {"old": ("language_model.model.", ""), "new": ("model.language_model.", "model.")}[names]
        file = path / "model.safetensors"
        save_file({_renamed(name, *prefixes): weight for name, weight in load_file(file).items()}, file)
    llm = start_llm(path, tokenizer=str(tiny_path()))
    check([llm.generate(prompt, ANSWER)[0] for prompt in prompts()[2:]], oracle)


def _renamed(name: str, text: str, other: str) -> str:
    """Under one of the two ways of naming, whichever it has."""
    bare = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
    if bare.startswith(("vision_tower.", "multi_modal_projector.")):
        return other + bare
    return ("language_model." if not other else "") + bare if bare.startswith("lm_head") else text + bare


# -- conversations -------------------------------------------------------------------------------------------------

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
END_OF_TURN = SPECIAL.index("<end_of_turn>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


def write_gemma_tokenizer(path: Path) -> None:
    """A tokenizer of Gemma's kind: pieces with byte fallback, and a <bos> before every text."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz\n"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, END_OF_TURN], "top_k": 64}))


@pytest.fixture
def chatty(tiny_path: Callable[..., Path], tmp_path: Path, start_llm: Callable[..., LLM]) -> LLM:
    source = tiny_path("gemma3", bos_token_id=2, eos_token_id=1)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    write_gemma_tokenizer(tmp_path)
    return start_llm(tmp_path)


def test_a_text_begins_once(chatty: LLM) -> None:
    """Both the template and the tokenizer write <bos>: a conversation gets it from the one, a text from the other."""
    sampling = SamplingParams(temperature=0.0, max_tokens=3)
    [chat] = chatty.chat([{"role": "user", "content": "hello"}], sampling)
    text = "<bos><start_of_turn>user\nhello<end_of_turn>\n<start_of_turn>model\n"
    assert chat.prompt_token_ids == chatty.engine.tokenizer.encode(text, add_special_tokens=False)
    assert chat.prompt_token_ids.count(2) == 1
    [plain] = chatty.generate("hello there", sampling)
    assert plain.prompt_token_ids[0] == 2
    assert plain.prompt_token_ids.count(2) == 1


def test_the_end_of_a_turn_ends_the_answer(chatty: LLM) -> None:
    """config.json names the end of a document alone."""
    sampling = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={END_OF_TURN: 100.0})
    [output] = chatty.chat([{"role": "user", "content": "hello"}], sampling)
    assert output.finish_reason is FinishReason.STOP
    assert output.token_ids == [END_OF_TURN]
    assert output.text == ""
