"""OpenVINO GenAI, its continuous batching pipeline, which reads a GGUF file by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = settings["cache_gb"]
    scheduler.max_num_batched_tokens = settings["max_num_batched_tokens"]
    scheduler.max_num_seqs = settings["max_num_seqs"]
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_NUM_THREADS": settings["threads"],
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": "bf16",
        "PERFORMANCE_HINT": "LATENCY",
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = [
            pipeline.add_request(index, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for index, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    return generate


if __name__ == "__main__":
    serve(load)
