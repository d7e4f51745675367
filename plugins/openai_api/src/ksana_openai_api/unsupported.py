"""Parameters of OpenAI and vLLM that this version has no meaning for, with the values that ask for nothing."""

from __future__ import annotations

from ksana.server.unsupported import NeutralValues

_EVERYWHERE: NeutralValues = {
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "logit_bias": ({},),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "prompt_logprobs": (),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "kv_transfer_params": (),
}

CHAT: NeutralValues = {
    **_EVERYWHERE,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "store": (False,),
    "chat_template": (),
    "documents": ([],),
    "continue_final_message": (False,),
}

COMPLETION: NeutralValues = {
    **_EVERYWHERE,
    # 0 asks for the probability of the chosen token.
    "logprobs": (),
    "suffix": ("",),
    "prompt_embeds": (),
}
