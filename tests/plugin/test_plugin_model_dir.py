"""The plugin of a model's folder: trust, loading, its three methods, threads, errors."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from ksana.engine.context import ProcessingContext
from ksana.errors import PluginLoadError, RequestError
from ksana.plugin.manager import KsanaPluginManager
from ksana.plugin.maybe_await import call_in_order
from ksana.plugin.model_dir import ModelDirPlugin, find_model_dir_plugin, register_model_dir_plugin
from ksana.testing.tiny_models import write_tiny_tokenizer
from ksana.text.tokenizer import FastTokenizer
from ksana.types.config import KsanaConfig, ModelOptions
from ksana.types.model import ModelConfig, RopeConfig
from ksana.types.output import FinishReason, RequestOutput
from ksana.types.request import InputEmbedding, RequestDraft
from ksana.types.sampling import SamplingParams

HIDDEN_SIZE = 4
EXAMPLE = Path(__file__).parents[2] / "examples" / "prompt_rewriter"


@pytest.fixture
def context(tmp_path: Path) -> ProcessingContext:
    write_tiny_tokenizer(tmp_path)
    model_config = ModelConfig(
        architecture="LlamaForCausalLM",
        name="tiny",
        vocab_size=512,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=4,
        max_model_len=64,
        dtype="float32",
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
    )
    tokenizer = FastTokenizer(tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    return ProcessingContext(KsanaConfig(), model_config, tmp_path, 64, tokenizer, None)


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., KsanaPluginManager]]:
    managers: list[KsanaPluginManager] = []

    def load_source(source: str, *, threads: int = 1) -> KsanaPluginManager:
        file = tmp_path / "ksana_plugin.py"
        file.write_text(source)
        manager = KsanaPluginManager()
        register_model_dir_plugin(manager, ModelDirPlugin(file, "serve.yaml", threads))
        managers.append(manager)
        return manager

    yield load_source
    for manager in managers:
        manager.hook.ksana_engine_stopping(engine=None, reason="the test is over")


def preprocess(manager: KsanaPluginManager, draft: RequestDraft, context: ProcessingContext) -> RequestDraft:
    asyncio.run(call_in_order(manager, "ksana_preprocess", draft=draft, context=context))
    return draft


def with_preprocess(body: str) -> str:
    return (
        "class KsanaPlugin:\n    def preprocess(self, ksana_python_input, **kwargs):\n"
        f"        x = ksana_python_input\n        {body}\n"
    )


# Finding and trusting


def test_without_trust_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ksana_plugin.py").write_text("raise AssertionError('must not run')")
    assert find_model_dir_plugin(tmp_path, ModelOptions()) is None
    (line,) = caplog.messages
    assert str(tmp_path / "ksana_plugin.py") in line
    assert "--trust-remote-code" in line


def test_with_trust_it_is_found_and_a_plain_folder_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = ModelOptions(trust_remote_code=True, plugin_thread_pool_size=3)
    assert find_model_dir_plugin(tmp_path, options) is None
    (tmp_path / "ksana_plugin.py").write_text("")
    assert find_model_dir_plugin(tmp_path, options, "c.yaml") == ModelDirPlugin(
        tmp_path / "ksana_plugin.py", "c.yaml", 3
    )
    assert caplog.messages == []


# Loading


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import module_of_nobody\n", "does not import: ModuleNotFoundError: .*line 1"),
        ("def f(:\n", "does not import: SyntaxError"),
        ("raise SystemExit\n", "does not import: SystemExit"),
        ("Plugin = 1\n", "defines no class KsanaPlugin"),
        ("ksana_api = 7\nclass KsanaPlugin: ...\n", "API 7,"),
        ("class KsanaPlugin:\n    ksana_api = 7\n    def init_plugin(self, **k):\n        1 / 0\n", "API 7,"),
        ("class KsanaPlugin:\n    def init_plugin(self, **k):\n        1 / 0\n", "ZeroDivisionError.*line 3"),
        ("class KsanaPlugin:\n    def init_plugin(self): ...\n", r"init_plugin must accept \*\*kwargs"),
        ("class KsanaPlugin:\n    def preprocess(self, prompt): ...\n", r"preprocess must accept \*\*kwargs"),
        ("class KsanaPlugin:\n    async def postprocess(self, **k): ...\n", "postprocess must be a plain method"),
        (
            "from ksana import hookimpl\nclass KsanaPlugin:\n    @hookimpl\n    def ksana_preproces(self): ...\n",
            "did you mean ksana_preprocess",
        ),
    ],
)
def test_a_broken_file_stops_the_start_with_file_and_cause(
    load: Callable[..., KsanaPluginManager], source: str, words: str
) -> None:
    before = set(sys.modules)
    with pytest.raises(PluginLoadError, match=words) as caught:
        load(source)
    assert "\n" not in str(caught.value)
    if "does not import" in words:
        assert not [name for name in set(sys.modules) - before if "model_plugin" in name]


def test_a_syntax_error_is_placed_in_the_plugin_and_nowhere_else(load: Callable[..., KsanaPluginManager]) -> None:
    with pytest.raises(PluginLoadError, match=r"\(\S+ksana_plugin\.py, line 2\)$") as caught:
        load("x = 1\ndef f(:\n")
    assert str(caught.value).count("line") == 1


def test_a_misspelt_method_is_pointed_out_and_a_helper_is_not(
    load: Callable[..., KsanaPluginManager], caplog: pytest.LogCaptureFixture
) -> None:
    load(
        "class KsanaPlugin:\n"
        "    def init_plugin(self, **k): ...\n"
        "    def preproces(self, **k): ...\n"
        "    def preprocess_image(self): ...\n"
    )
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "KsanaPlugin.preproces is never called; did you mean preprocess?"
    ]


def test_init_plugin_gets_the_contract(load: Callable[..., KsanaPluginManager], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    manager = load("class KsanaPlugin:\n    def init_plugin(self, **kwargs):\n        self.got = kwargs\n")
    assert manager.get_plugin("model-folder").got == {
        "preprocess": True,
        "postprocess": True,
        "model_path": str(tmp_path),
        "config_file": "serve.yaml",
        "enable_trt": False,
        "model_type": "qwen2",
        "vit_model_type": None,
    }


def test_siblings_are_imported_relatively_and_shadow_nothing(
    load: Callable[..., KsanaPluginManager], tmp_path: Path
) -> None:
    (tmp_path / "colorsys.py").write_text("NAME = 'sibling'\n")
    path = list(sys.path)
    source = (
        "from .colorsys import NAME\nimport colorsys as standard\n"
        "class KsanaPlugin:\n    pair = (NAME, standard.__file__)\n"
    )
    plugin = load(source).get_plugin("model-folder")
    assert plugin.pair[0] == "sibling"
    assert plugin.pair[1] != str(tmp_path / "colorsys.py")
    assert sys.path == path
    assert "ksana_plugin" not in sys.modules


def test_marked_methods_are_hooks(load: Callable[..., KsanaPluginManager]) -> None:
    manager = load(
        "from ksana import hookimpl\nclass KsanaPlugin:\n"
        "    @hookimpl\n    def ksana_configure(self, config):\n        config.append(1)\n"
    )
    seen: list[int] = []
    manager.hook.ksana_configure(config=seen, pluginmanager=manager)
    assert seen == [1]


# preprocess


def test_preprocess_gets_the_contract(load: Callable[..., KsanaPluginManager], context: ProcessingContext) -> None:
    manager = load(
        "class KsanaPlugin:\n    def preprocess(self, **kwargs):\n"
        "        x = kwargs.pop('ksana_python_input')\n"
        "        self.got = kwargs, x.model_name, x.input_tokens, x.sampling_config.max_new_tokens\n"
    )
    draft = preprocess(manager, RequestDraft(prompt="the model", additional_params={"a": 1}), context)
    plugin = manager.get_plugin("model-folder")
    expected = {"prompt": "the model", "messages": None, "additional_params": {"a": 1}}
    assert plugin.got == (expected, "tiny", context.tokenizer.encode("the model"), -1)
    assert draft == RequestDraft(prompt="the model", additional_params={"a": 1}), "looking changes nothing"


@pytest.mark.parametrize(
    ("body", "prompt", "token_ids"),
    [
        ("x.prompt += '!'", "hi!", None),
        ("x.input_tokens = [5, 6]", None, [5, 6]),
        ("x.input_tokens.insert(0, 9)", None, "9+"),
        ("x.prompt = 'other'; x.input_tokens = [7]", None, [7]),
        ("x.input_tokens = list(x.input_tokens)", "hi", None),
    ],
)
def test_a_changed_input_replaces_the_whole_input(
    load: Callable[..., KsanaPluginManager],
    context: ProcessingContext,
    body: str,
    prompt: str | None,
    token_ids: list[int] | str | None,
) -> None:
    draft = preprocess(load(with_preprocess(body)), RequestDraft(prompt="hi"), context)
    expected = [9, *context.tokenizer.encode("hi")] if token_ids == "9+" else token_ids
    assert (draft.prompt, draft.prompt_token_ids, draft.messages) == (prompt, expected, None)


def test_messages_can_be_edited_or_replaced_by_tokens(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    edit = "class KsanaPlugin:\n    def preprocess(self, messages, **k):\n        messages[0]['content'] = 'ho'\n"
    draft = preprocess(load(edit), RequestDraft(messages=[dict(messages[0])]), context)
    assert draft.messages == [{"role": "user", "content": "ho"}]
    replace = with_preprocess("assert x.input_tokens == []; x.input_tokens = [3]")
    draft = preprocess(load(replace), RequestDraft(messages=messages), context)
    assert (draft.messages, draft.prompt_token_ids) == (None, [3])


def test_sampling_fields_are_read_and_written_under_the_original_names(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext
) -> None:
    body = (
        "s = x.sampling_config; assert (s.topk, s.topp, s.stop_strings) == (5, 0.5, ['a']); "
        "s.topk = 7; s.topp = 0.25; s.max_new_tokens = 3; s.stop_strings.append('b'); s.seed = 1"
    )
    before = SamplingParams(top_k=5, top_p=0.5, stop=("a",), min_p=0.1, skip_special_tokens=False)
    draft = preprocess(load(with_preprocess(body)), RequestDraft(prompt="hi", sampling=before), context)
    assert draft.sampling == SamplingParams(
        top_k=7, top_p=0.25, max_tokens=3, stop=("a", "b"), seed=1, min_p=0.1, skip_special_tokens=False
    )


def test_penalties_bans_and_biases_are_read_and_written(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext
) -> None:
    body = (
        "s = x.sampling_config; assert (s.repetition_penalty, s.logit_bias, s.min_tokens) == (1.2, {5: 1.0}, 2); "
        "s.logit_bias[6] = -2; s.no_repeat_ngram_size = 3; s.bad_words.append('no'); s.presence_penalty = 0.5"
    )
    before = SamplingParams(repetition_penalty=1.2, logit_bias=((5, 1.0),), min_tokens=2, frequency_penalty=0.1)
    draft = preprocess(load(with_preprocess(body)), RequestDraft(prompt="hi", sampling=before), context)
    assert draft.sampling == SamplingParams(
        repetition_penalty=1.2,
        logit_bias=((5, 1.0), (6, -2)),
        min_tokens=2,
        frequency_penalty=0.1,
        no_repeat_ngram_size=3,
        bad_words=("no",),
        presence_penalty=0.5,
    )


def test_do_sample_false_is_greedy(load: Callable[..., KsanaPluginManager], context: ProcessingContext) -> None:
    manager = load(with_preprocess("x.sampling_config.do_sample = False"))
    assert preprocess(manager, RequestDraft(prompt="hi"), context).sampling.is_greedy


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ("x.sampling_config.num_beams = 33", "num_beams"),
        ("x.sampling_config.enable_thinking = False", "enable_thinking"),
        ("x.sampling_config.topp = 7", "top_p"),
        ("x.sampling_config.logit_bias = {5: 101}", "logit_bias"),
        ("x.request_target = {'logits': {}}", "request_target"),
        ("x.structured_output_regex = 'a+'", "structured_output_regex"),
        ("x.input_refit_embedding.pos.append(0)", "input_refit_embedding"),
        ("x.input_refit_embedding.additional_tensors.append([1])", "input_refit_embedding"),
        ("r = x.input_refit_embedding; r.pos = [0]; r.embeddings = [[1.0] * 5]", "input_refit_embedding"),
        ("r = x.input_refit_embedding; r.pos = [-1]; r.embeddings = [[1.0] * 4]", "input_refit_embedding"),
        ("r = x.input_refit_embedding; r.pos = [0]; r.embeddings = [['a'] * 4]", "input_refit_embedding"),
        ("r = x.input_refit_embedding; r.pos = [0]; r.embeddings = [[]]", "input_refit_embedding"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext, body: str, param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        preprocess(load(with_preprocess(body)), RequestDraft(prompt="hi"), context)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        "r.embeddings = [[0.0, 1, 2, 3, 4, 5, 6, 7]]",
        "import numpy; r.embedding_tensors = [numpy.arange(8).reshape(2, 4)]",
        "import torch; r.embedding_tensors = [torch.arange(8, dtype=torch.bfloat16, requires_grad=False).view(2, 4)]",
        "import torch; r.embedding_tensors = [torch.arange(8.0, requires_grad=True)]",
    ],
    ids=["flat list", "numpy", "torch bfloat16", "torch flat with gradient"],
)
def test_refit_embeddings_become_float32_rows(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext, body: str
) -> None:
    manager = load(with_preprocess(f"r = x.input_refit_embedding; r.pos = [1]; {body}"))
    (entry,) = preprocess(manager, RequestDraft(prompt="hi there"), context).embeddings
    assert (entry.position, entry.rows.dtype, entry.rows.shape) == (1, np.float32, (2, HIDDEN_SIZE))
    assert entry.rows.ravel().tolist() == list(range(8))


def test_embeddings_of_the_client_are_shown_and_kept(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext
) -> None:
    rows = np.ones((1, HIDDEN_SIZE), np.float32)
    body = "r = x.input_refit_embedding; r.pos.append(3); r.embedding_tensors.append(r.embedding_tensors[0] * 2)"
    draft = RequestDraft(prompt="hi there", embeddings=[InputEmbedding(2, rows)])
    preprocess(load(with_preprocess(body)), draft, context)
    assert [(entry.position, entry.rows.tolist()) for entry in draft.embeddings] == [
        (2, [[1.0] * 4]),
        (3, [[2.0] * 4]),
    ]


def test_the_plugin_may_reuse_its_buffer(load: Callable[..., KsanaPluginManager], context: ProcessingContext) -> None:
    manager = load(
        "import numpy\nclass KsanaPlugin:\n    buffer = numpy.zeros((1, 4), numpy.float32)\n"
        "    def preprocess(self, ksana_python_input, **k):\n        self.buffer += 1\n"
        "        ksana_python_input.input_refit_embedding.pos = [0]\n"
        "        ksana_python_input.input_refit_embedding.embedding_tensors = [self.buffer]\n"
    )
    drafts = [preprocess(manager, RequestDraft(prompt="hi"), context) for _ in range(2)]
    assert [draft.embeddings[0].rows[0, 0] for draft in drafts] == [1.0, 2.0]


# postprocess


def finished_output() -> RequestOutput:
    return RequestOutput(
        "r1", [1, 2], text="an answer", token_ids=[3, 4], finish_reason=FinishReason.LENGTH, extra={"kept": 1}
    )


def postprocess(manager: KsanaPluginManager, output: RequestOutput, context: ProcessingContext) -> RequestOutput:
    draft = RequestDraft(prompt="ask")
    asyncio.run(call_in_order(manager, "ksana_postprocess", output=output, draft=draft, context=context))
    return output


def test_postprocess_sees_the_answer_and_adds_results(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext
) -> None:
    manager = load(
        "class KsanaPlugin:\n    def postprocess(self, ksana_python_input, ksana_python_output):\n"
        "        o = ksana_python_output\n"
        "        o.extra['seen'] = [ksana_python_input.input_tokens, o.input_tokens, o.output_tokens, o.texts,"
        " o.finish_status]\n"
        "        o.texts[0] = o.texts[0].upper()\n        o.output_tokens[0].append(5)\n"
    )
    output = postprocess(manager, finished_output(), context)
    assert output.extra == {"kept": 1, "seen": [[1, 2], [1, 2], [[3, 4, 5]], ["AN ANSWER"], "length"]}
    assert (output.text, output.token_ids) == ("AN ANSWER", [3, 4, 5])


def test_a_result_that_is_no_json_fails_where_the_plugin_is_known(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext, caplog: pytest.LogCaptureFixture
) -> None:
    manager = load(
        "class KsanaPlugin:\n    def postprocess(self, ksana_python_output, **k):\n"
        "        ksana_python_output.extra['ppl'] = float('nan')\n"
    )
    output = finished_output()
    with pytest.raises(RequestError) as caught:
        postprocess(manager, output, context)
    assert caught.value.code == "plugin_error"
    assert output.extra == {"kept": 1}
    assert "ksana_plugin.py" in caplog.text


# Errors and threads


@pytest.mark.parametrize(
    "statement", ["1 / 0", "raise SystemExit(0)", "raise StopIteration", "x.sampling_config.top_k = 5"]
)
def test_a_failure_is_logged_and_hidden_from_the_client(
    load: Callable[..., KsanaPluginManager],
    context: ProcessingContext,
    caplog: pytest.LogCaptureFixture,
    statement: str,
) -> None:
    with pytest.raises(RequestError) as caught:
        preprocess(load(with_preprocess(statement)), RequestDraft(prompt="hi"), context)
    error = caught.value
    assert (error.status, error.type, error.code) == (500, "server_error", "plugin_error")
    assert "Error" not in error.message
    assert "ksana_plugin.py" not in error.message
    assert "Traceback" in caplog.text


def test_a_refusal_of_the_plugin_reaches_the_client(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext, caplog: pytest.LogCaptureFixture
) -> None:
    body = "from ksana import RequestError; raise RequestError('no', status=451)"
    with pytest.raises(RequestError, match="no") as caught:
        preprocess(load(with_preprocess(body)), RequestDraft(prompt="hi"), context)
    assert caught.value.status == 451
    assert caplog.messages == []


BLOCKING = (
    "import threading\nclass KsanaPlugin:\n"
    "    def __init__(self):\n        self.entered = threading.Semaphore(0)\n        self.go = threading.Event()\n"
    "    def preprocess(self, **kwargs):\n        self.entered.release()\n        assert self.go.wait(10)\n"
    "        self.thread = threading.current_thread()\n"
)


def test_a_slow_plugin_does_not_block_the_loop_and_one_thread_serialises(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext
) -> None:
    manager = load(BLOCKING)
    plugin = manager.get_plugin("model-folder")

    async def main() -> None:
        calls = [
            asyncio.ensure_future(
                call_in_order(manager, "ksana_preprocess", draft=RequestDraft(prompt="hi"), context=context)
            )
            for _ in range(2)
        ]
        assert await asyncio.to_thread(plugin.entered.acquire, timeout=10), "the loop turns while the plugin blocks"
        assert not plugin.entered.acquire(timeout=0.05), "the second call waits for the first"
        plugin.go.set()
        await asyncio.gather(*calls)

    asyncio.run(main())
    assert plugin.thread is not threading.main_thread()


def test_two_threads_run_two_calls_at_once(load: Callable[..., KsanaPluginManager], context: ProcessingContext) -> None:
    manager = load(BLOCKING, threads=2)
    plugin = manager.get_plugin("model-folder")

    async def main() -> None:
        calls = [
            asyncio.ensure_future(
                call_in_order(manager, "ksana_preprocess", draft=RequestDraft(prompt="hi"), context=context)
            )
            for _ in range(2)
        ]
        for _ in range(2):
            assert await asyncio.to_thread(plugin.entered.acquire, timeout=10)
        plugin.go.set()
        await asyncio.gather(*calls)

    asyncio.run(main())


def test_a_stopping_engine_gives_the_threads_back(
    load: Callable[..., KsanaPluginManager], context: ProcessingContext
) -> None:
    manager = load(
        "import threading\nclass KsanaPlugin:\n    def preprocess(self, **kwargs):\n"
        "        self.thread = threading.current_thread()\n"
    )
    preprocess(manager, RequestDraft(prompt="hi"), context)
    thread = manager.get_plugin("model-folder").thread
    manager.hook.ksana_engine_stopping(engine=None, reason="test")
    thread.join(10)
    assert not thread.is_alive()


# The example


def test_the_prompt_rewriter_example(context: ProcessingContext) -> None:
    manager = KsanaPluginManager()
    register_model_dir_plugin(manager, ModelDirPlugin(EXAMPLE / "ksana_plugin.py"))
    assert preprocess(manager, RequestDraft(prompt="A KV, not a KVM"), context).prompt == "A key-value, not a KVM"
    draft = RequestDraft(messages=[{"role": "user", "content": "What is TTFT?"}])
    assert preprocess(manager, draft, context).messages == [{"role": "user", "content": "What is time to first token?"}]
    draft = RequestDraft(prompt="KV", additional_params={"rewrite": False})
    assert preprocess(manager, draft, context).prompt == "KV"
