"""What each request field means, in one line: for ``/openapi.json`` and docs/api.md.

A key is a field's name, or ``Struct.name`` where one type means something else by it.
tests/unit/test_openapi.py compares the keys with the fields of the types.
"""

from __future__ import annotations

from typing import Any

from .bounds import (
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    REQUEST_ID_FORM,
    SESSION_ID_FORM,
)

__all__ = ["ALIAS", "DESCRIPTIONS", "FORMS", "describe"]

ALIAS = "return_token_ids"
"""The field that no type has, since it is folded into ``nvext`` before."""

LOGPROBS = "Return each output token's log probability, and those of so many most likely tokens."

DESCRIPTIONS = {
    # OpenAI's
    "best_of": "Must equal n: outputs are not ranked.",
    "ChatRequest.logprobs": "Return each output token's log probability.",
    "CompletionRequest.logprobs": LOGPROBS,
    "GenerateParams.logprobs": LOGPROBS,
    "echo": (
        "Put the prompt before the output; on chat the last message, if it is the "
        "assistant's. With logprobs, the prompt's too (then not on streams)."
    ),
    "frequency_penalty": "Subtracted from a token's logit for each time it is there.",
    "logit_bias": "Added to the logits of tokens, by token id.",
    "max_completion_tokens": "max_tokens under its newer name; goes first.",
    "ChatRequest.max_tokens": (
        "Most output tokens; default: as many as the context length leaves."
    ),
    "CompletionRequest.max_tokens": (
        "Most output tokens; default: 16. 0 only with echo: the prompt alone, scored."
    ),
    "messages": "The conversation; content is text, or a list of text parts.",
    "metadata": "A label; has no effect.",
    "model": "The served model's name, or an adapter's, or absent.",
    "n": "Choices per prompt; default: 1. With prompts in a list, 128 in all.",
    "presence_penalty": "Subtracted from a token's logit once it is there.",
    "prompt": (
        "A text, a list of token ids, or a list of either for several prompts at once."
    ),
    "prompt_cache_key": "A label; has no effect: the prefix cache works by itself.",
    "response_format": (
        "What the output must be: any text, a JSON object, or JSON of a schema."
    ),
    "safety_identifier": "A label; has no effect.",
    "seed": "Makes sampling repeatable; -1: none.",
    "stop": (
        f"Texts that end the output: up to {MAX_STOP_STRINGS} of up to "
        f"{MAX_STOP_CHARS} characters."
    ),
    "stream": "Answer with server-sent events, one chunk per token.",
    "stream_options": "Only with stream.",
    "StreamOptions.include_usage": "Send a last chunk with the usage and no choices.",
    "StreamOptions.continuous_usage_stats": (
        "vLLM's: the usage so far on every chunk."
    ),
    "temperature": (
        "0: greedy. Default: that of the model's generation_config.json, else 1."
    ),
    "top_logprobs": "So many most likely tokens with each; above 0 it needs logprobs.",
    "top_p": (
        "Sample among the tokens that make up so much probability. Default: that of "
        "generation_config.json, else 1."
    ),
    "user": "A label; has no effect.",
    # vLLM's
    "add_generation_prompt": (
        "End the prompt where the assistant begins to speak; default: true, unless "
        "continue_final_message."
    ),
    "add_special_tokens": (
        "Let the tokenizer add its own (BOS); default: true for prompts, false for "
        "chats, whose template writes them."
    ),
    "allowed_token_ids": "Only these tokens may be sampled.",
    "bad_words": "Texts that may not be in the output.",
    "cache_salt": "No KV cache is shared between different salts; a chat with one "
    "takes no tokenized part from others, and leaves none.",
    "GenerateParams.max_tokens": (
        "Most output tokens; cut to what the context length leaves. Default: that."
    ),
    "GenerateParams.min_p": (
        "Sample among tokens at least so likely, relative to the likeliest. Default: 0."
    ),
    "GenerateParams.repetition_penalty": (
        "Divides the logits of tokens that are there already. Default: 1."
    ),
    "GenerateParams.temperature": "0: greedy. Default: 1.",
    "GenerateParams.top_k": "Sample among so many most likely tokens. Default: all.",
    "GenerateParams.top_p": (
        "Sample among the tokens that make up so much probability. Default: 1."
    ),
    "chat_template": (
        "A template in place of the model's; refused unless the operator set "
        "--trust-request-chat-template."
    ),
    "chat_template_kwargs": "More variables for the chat template.",
    "continue_final_message": "Let the output go on with the last message.",
    "tools": (
        "Functions that the model may call; the chat template shows them. Calls are "
        "parsed by a frontend with --tool-call-parser."
    ),
    "tool_choice": (
        "none: no call; auto: the model decides; required, or a named tool: the output "
        "is held to be a call. Default: auto with tools, else none."
    ),
    "parallel_tool_calls": "false: only the first call counts. Default: true.",
    "reasoning_effort": (
        "Given to the chat template; none also as enable_thinking=false, any other as "
        "true."
    ),
    "include_reasoning": "false: leave the reasoning out of the answer. Default: true.",
    "documents": "Given to the chat template, as its variable of that name.",
    "ignore_eos": "Go on after an end-of-sequence token.",
    "include_stop_str_in_output": "Leave the stop string that matched in the text.",
    "min_p": (
        "Sample among tokens at least so likely, relative to the likeliest. Default: "
        "that of generation_config.json, else 0."
    ),
    "min_tokens": "No stop before so many tokens; at most max_tokens.",
    "nvext": "What is asked for beside OpenAI's answer.",
    "priority": "Lower values are scheduled first; default: 0.",
    "prompt_logprobs": (
        "Return the prompt tokens' log probabilities, and those of so many most likely "
        "tokens; on streams only with the selector prompt_logprobs."
    ),
    "repetition_penalty": (
        "Divides the logits of tokens that are there already. Default: that of "
        "generation_config.json, else 1."
    ),
    "request_id": "Echoed in X-Request-Id, unless the request has that header.",
    ALIAS: (
        "vLLM's name for nvext.extra_fields=['completion_token_ids']; the ids then also "
        "stand where vLLM puts them."
    ),
    "required_prefix_token_ids": (
        "The exact ids of the conversation up to the end of its last assistant message: "
        "the prompt begins with them. Also on that message, as prompt_token_ids and "
        "generation_token_ids."
    ),
    "return_tokens_as_token_ids": "Write tokens in logprobs as token_id:N.",
    "session_id": (
        "Requests of one session go to the workers that have served it, while these are "
        "not notably busier than others. Wins over the header X-Session-ID."
    ),
    "skip_special_tokens": "Leave special tokens out of the text; default: true.",
    "stop_token_ids": "Tokens that end the output, beside the model's own.",
    "structured_outputs": (
        "What the output must be: exactly one of json, json_object, regex, choice, "
        "grammar and structural_tag (xgrammar's, as JSON)."
    ),
    "top_k": (
        "Sample among so many most likely tokens; 0 or -1: all. Default: that of "
        "generation_config.json, else all."
    ),
    "truncate_prompt_tokens": (
        "Keep so many ids of the prompt; -1: what leaves room for one of the output."
    ),
    "truncation_side": "left (the default): keep the prompt's last ids; right: its first.",
    # nvext's
    "Nvext.extra_fields": (
        "Selects fields of the answer's nvext; any needs one choice: n=1, one prompt."
    ),
    "Nvext.token_data": (
        "On chat: the prompt's token ids, in place of template and tokenizer; the "
        "messages then count for nothing."
    ),
    "migratable": (
        "false: never go on at another worker when one fails after the first token."
    ),
    "exactness": (
        "How exactly an output goes on at another worker. best_effort (the default): also "
        "where a seed, a penalty or bad words may drift by that; same_rng: with the same "
        "draws; bitwise: with the same numbers; these rather end with an error."
    ),
    "resumable": (
        "true, or an object of options: the answer can be resumed when it ends early. "
        "Its chunks carry ids, token_offset and seq; needs one choice."
    ),
    "on_disconnect": (
        "cancel (the default): a generation whose client is gone ends; continue: a "
        "streamed one goes on at its worker, to be followed at /v1/generations/{id}/stream."
    ),
    "ttl_s": (
        "How long its checkpoints may be resumed (at most, and by default, "
        "--checkpoint-life-s), and how long it is kept behind its end, or without a "
        "reader (at most --journal-life-s; default: 600)."
    ),
    "checkpoint": "What a resumable answer tells of where it stands.",
    "resume_from": "Go on behind output that this request has had: see docs/resume.md.",
    "ResumeFrom.checkpoint": "Where it stands: see docs/checkpoint.schema.json.",
    "ResumeFrom.generation_id": (
        "In place of a checkpoint: a streamed generation of this API key, which has ended "
        "and is still kept."
    ),
    "ResumeFrom.seq": (
        "Beside generation_id: the number of the last event that the client has; all of "
        "them by default."
    ),
    "ResumeFrom.output_token_ids": "In place of a checkpoint: all of that output.",
    "ResumeFrom.prompt_token_ids": (
        "Beside output_token_ids: refuse to go on behind another prompt."
    ),
    "ResumeFrom.contract": (
        "Beside output_token_ids: refuse to go on under another contract than this, "
        "generation.contract of the first chunk."
    ),
    "every_tokens": (
        "A checkpoint in the stream whenever so many more output tokens are out; "
        "default: at the end alone."
    ),
    "CheckpointOptions.prompt": (
        "ids: checkpoints have the prompt's token ids; hash (the default): their hash."
    ),
    # those of tools
    "Tool.type": "Always function.",
    "Tool.function": "What may be called.",
    "Tool.defer_loading": "Given to the chat template.",
    "Function.name": "The name that a call gives.",
    "Function.description": "Tells the model what it is for.",
    "Function.parameters": "The JSON schema of a call's arguments.",
    "Function.strict": "Hold calls to the schema, where the parser has a grammar for it.",
    "Function.defer_loading": "Given to the chat template.",
    "NamedTool.type": "Always function.",
    "NamedTool.function": "The one to call.",
    "NamedFunction.name": "The name of one of tools.",
    # those of the token routes
    "TokenizeText.prompt": "The text.",
    "TokenizeText.add_special_tokens": "Let the tokenizer add its own; default: true.",
    "TokenizeChat.add_special_tokens": "The same; default: false, the template does.",
    "TokenizeChat.tools": "Given to the chat template.",
    "return_token_strs": "Return the tokens' texts, too.",
    "tokens": "The ids.",
    "token_ids": "The prompt's ids.",
    "sampling_params": "How to sample; keys that are not known here are ignored.",
    "GenerateRequest.return_token_ids": "Return the prompt's ids, too.",
    "output_mode": "Only tokens.",
    "features": "Only null: the input is text.",
    "content_parts": "Only null: the input is text.",
    "token_offsets": "Only null: there are no parts.",
    "reasoning_ended": (
        "Whether structured output binds from the first token on; null: where the "
        "engine's own reasoning parser says so."
    ),
    "reasoning_parser_kwargs": (
        "For that parser: one object, chat_template_kwargs, as a render route answers."
    ),
}

_TEXT: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}
_TOKEN_ID: dict[str, Any] = {"type": "integer", "minimum": 0}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_TOKEN_IDS = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": _TEXT,
        "content": {
            "anyOf": [_TEXT, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]
        },
    },
    "required": ["role"],
}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


def _structure(kind: str, form: dict[str, Any]) -> dict[str, Any]:
    pattern = {"type": ["string", "null"]}
    return {
        "type": "object",
        "properties": {kind: form, "whitespace_pattern": pattern},
        "required": [kind],
    }


FORMS: dict[str, list[dict[str, Any]]] = {
    "allowed_token_ids": [_TOKEN_IDS],
    "bad_words": [{"type": "array", "items": {"type": "string", "minLength": 1}}],
    "cache_salt": [{"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS}],
    "messages": [{"type": "array", "items": _MESSAGE, "minItems": 1}],
    "prompt": [
        _TEXT,
        _TOKEN_IDS,
        _TEXTS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ],
    "request_id": [{"type": "string", "pattern": f"^{REQUEST_ID_FORM}$"}],
    "response_format": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {"schema": _OBJECT},
                    "required": ["schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
    ],
    "session_id": [{"type": "string", "pattern": f"^{SESSION_ID_FORM}$"}],
    "stop": [
        _STOP_TEXT,
        {"type": "array", "items": _STOP_TEXT, "maxItems": MAX_STOP_STRINGS},
    ],
    "stop_token_ids": [{"type": "array", "items": _TOKEN_ID}],
    "structured_outputs": [
        _structure("json", {"type": ["object", "string"]}),
        _structure("json_object", {"const": True}),
        _structure("regex", _TEXT),
        _structure("grammar", _TEXT),
        _structure("choice", _TEXTS),
        _structure("structural_tag", _TEXT),
    ],
    "required_prefix_token_ids": [_TOKEN_IDS],
    "tool_choice": [
        {"enum": ["none", "auto", "required"]},
        {"$ref": "#/components/schemas/NamedTool"},
    ],
    "Nvext.token_data": [_TOKEN_IDS],
    "TokenizeText.prompt": [_TEXT],
    "token_ids": [_TOKEN_IDS],
    "tokens": [{"type": "array", "items": _TOKEN_ID}],
}
"""What a field must be, null apart, where its type says less than its checks do."""


def describe(struct: str, field: str) -> str | None:
    """Return what *field* of the type *struct* means, if it is known."""
    return DESCRIPTIONS.get(f"{struct}.{field}", DESCRIPTIONS.get(field))
