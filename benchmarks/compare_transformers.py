"""Ksana beside ``transformers`` ``generate``, on the same weights, batch sizes, threads and prompts, in one run.

    python benchmarks/compare_transformers.py
    python benchmarks/compare_transformers.py --dtype float32 --rounds 5

Each engine runs in a process of its own; rounds alternate between them, so that a slower or faster minute of the
machine meets both. Prompts are random tokens (no prefix is shared), decoding is greedy, end-of-sequence is ignored.
Decode throughput leaves the prefill out: time for all tokens less the time for one. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], None]

DECODE = [(1, 128, 64), (8, 128, 64), (32, 128, 32)]
PREFILL = [(1, 1024), (8, 512)]
ENGINES = ("ksana", "transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        print(json.dumps(measure(create(arguments.engine, arguments.dtype, arguments.threads), arguments.seed)))
        return
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in ENGINES}
    for round_number in range(arguments.rounds):
        for engine in ENGINES:
            print(f"round {round_number + 1} of {arguments.rounds}: {engine} ...", file=sys.stderr)
            results[engine].append(run_in_process(engine, arguments.dtype, arguments.threads, round_number))
    report(results, arguments)


def run_in_process(engine: str, dtype: str, threads: int, seed: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--engine", engine, "--dtype", dtype]
    command += ["--threads", str(threads), "--seed", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return figures


def create(engine: str, dtype: str, threads: int) -> Generate:
    return create_ksana(dtype, threads) if engine == "ksana" else create_transformers(dtype, threads)


def create_ksana(dtype: str, threads: int) -> Generate:
    from ksana import LLM, SamplingParams

    llm = LLM("demo", dtype=dtype, threads=threads, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], count: int) -> None:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        assert all(len(output.token_ids) == count for output in outputs)

    return generate


def create_transformers(dtype: str, threads: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from ksana.models.locate import resolve_model

    torch.set_num_threads(threads)
    path = resolve_model("demo")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
    ).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts)
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=2,
        )
        assert output.shape[1] == ids.shape[1] + count

    return generate


def measure(generate: Generate, seed: int) -> dict[str, float]:
    rng = random.Random(seed)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(100, 49_000) for _ in range(length)] for _ in range(count)]

    def seconds(batch: list[list[int]], count: int) -> float:
        started = time.perf_counter()
        generate(batch, count)
        return time.perf_counter() - started

    figures = {}
    for batch, length, count in DECODE:
        generate(prompts(batch, length), 4)
        first = min(seconds(prompts(batch, length), 1) for _ in range(2))
        total = min(seconds(prompts(batch, length), count) for _ in range(2))
        figures[f"decode, {batch} at once"] = batch * (count - 1) / (total - first)
    for batch, length in PREFILL:
        generate(prompts(batch, length), 1)
        figures[f"prefill, {batch} x {length}"] = (
            batch * length / min(seconds(prompts(batch, length), 1) for _ in range(3))
        )
    return figures


def report(results: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    print(
        f"SmolLM2-135M, {arguments.dtype}, {arguments.threads} threads, medians of {arguments.rounds} rounds, tokens/s"
    )
    print(f"{'scenario':<22}{'ksana':>10}{'transformers':>14}{'ratio':>8}   spread of the ratio")
    for scenario in results["ksana"][0]:
        ours, theirs = ([figures[scenario] for figures in results[engine]] for engine in ENGINES)
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        mine, other = statistics.median(ours), statistics.median(theirs)
        print(f"{scenario:<22}{mine:>10.1f}{other:>14.1f}{mine / other:>8.2f}   {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
