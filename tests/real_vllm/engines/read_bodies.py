"""What vLLM reads in request bodies: `read_bodies.py < LINES > LINES`, run in the engines' Python.

A line in is `PATH TAB BODY`; the line out is a JSON object, or null where vLLM refuses the body
while it parses it. `read_bodies.py --fields` prints the names of all fields of the two requests.
"""

import json
import logging
import sys
import warnings
from types import SimpleNamespace

from vllm.entrypoints.generate.base.protocol import StreamOptions
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

CLASSES = {"/v1/chat/completions": ChatCompletionRequest, "/v1/completions": CompletionRequest}
MODEL = SimpleNamespace(max_model_len=4096)


def read(path, raw):
    """The request as vLLM sees it; None where it is refused before it has an id."""
    try:
        request = CLASSES[path].model_validate(json.loads(raw))
    except (VLLMValidationError, ValueError, TypeError, AttributeError, LookupError):
        return None
    is_chat = path == "/v1/chat/completions"
    most = request.max_completion_tokens if is_chat else None
    most = request.max_tokens if most is None else most
    return {
        "model": request.model,
        "stream": bool(request.stream),
        "n": 1 if request.n is None else request.n,
        "max_tokens": most,
        "priority": request.priority,
        "session_id": request.session_id,
        "cache_salt": request.cache_salt,
        "ids": None if is_chat else ids_of(request.prompt),
        "prompts": 1 if is_chat else prompts_of(request.prompt),
        "truncates": request.truncate_prompt_tokens is not None,
        "needs_whole": needs_whole(request, is_chat),
        "returns": returns(request, is_chat),
        "ends": ends(request),
        "prompt": prompt_of(request, is_chat),
    }


def ids_of(prompt):
    """Number of token ids; None for text."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], str):
        return None
    return sum(map(len, prompt)) if isinstance(prompt[0], list) else len(prompt)


def prompts_of(prompt):
    """Number of prompts; none are given as embeddings here."""
    is_many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return len(prompt) if is_many else 1


def needs_whole(request, is_chat):
    """Whether one request has to compute the whole prompt."""
    embeds = None if is_chat else request.prompt_embeds
    return bool(
        request.use_beam_search
        or request.echo
        or request.prompt_logprobs is not None
        or embeds is not None
        or request.kv_transfer_params is not None
    )


def returns(request, is_chat):
    """Whether the answer repeats the prompt, or has a value per token of it or the vocabulary."""
    text = request.return_prompt_text if is_chat else None
    logprobs = request.logprobs or (is_chat and request.top_logprobs)
    return bool(request.return_token_ids or text or logprobs or request.logprob_token_ids)


def ends(request):
    """Whether anything but the length could end the answer."""
    detection, budget = request.repetition_detection, request.thinking_token_budget
    stops = request.stop or request.stop_token_ids or request.min_tokens
    return bool(stops or detection or budget is not None or not request.ignore_eos)


def prompt_of(request, is_chat):
    """All that makes the prompt's tokens and the identity of its KV, as text.

    None where vLLM asks for fewer output tokens: that comes after parsing, and P is told of it.
    """
    try:
        tokens = repr(request.build_tok_params(MODEL).get_encode_kwargs())
    except VLLMValidationError:
        return None
    parts = [tokens, repr(request.model), repr(request.cache_salt), repr(request.vllm_xargs)]
    if is_chat:
        parts += [repr(request.messages), repr(request.tools), repr(request.mm_processor_kwargs)]
        parts += [repr(request.build_chat_params(None, "auto"))]
    else:
        parts += [repr(request.prompt)]
    return "\n".join(parts)


def main():
    """Answer line by line."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["--fields"]:
        classes = {**CLASSES, "stream_options": StreamOptions}
        fields = {name: sorted(found.model_fields) for name, found in classes.items()}
        sys.stdout.write(json.dumps(fields))
        return
    for line in sys.stdin.buffer:
        path, _, raw = line.rstrip(b"\n").partition(b"\t")
        sys.stdout.write(json.dumps(read(path.decode(), raw)) + "\n")


if __name__ == "__main__":
    main()
