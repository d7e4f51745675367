"""Parameters of OpenAI and vLLM that this server has no meaning for, with the values that ask for nothing."""

from __future__ import annotations

from ksana.server.unsupported import NeutralValues

_EVERYWHERE: NeutralValues = {
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "kv_transfer_params": (),
}

CHAT: NeutralValues = {
    **_EVERYWHERE,
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "chat_template": (),
    "continue_final_message": (False,),
    "echo": (False,),
    "best_of": (1,),
}

COMPLETION: NeutralValues = {
    **_EVERYWHERE,
    "suffix": ("",),
    "prompt_embeds": (),
}
