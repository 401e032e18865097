"""Stand-ins for each engine's token interface: each checks every field that it gets, as the real one does,
and generates by a rule that the tests know: token k of sample prompt P is sum(P) + k, mod 1000."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.router.external.stand_in import Caught, Exchange, StandIn, only

EOS = 2
SAMPLING = {
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "ignore_eos", "min_tokens", "seed", "stop_token_ids", "logit_bias", "max_tokens", "logprobs",
    "prompt_logprobs",
}  # fmt: skip


def answer_of(prompt: list[int], num: int, stops: list[int]) -> tuple[list[int], str, int | None]:
    """What any stand-in generates: tokens, finish reason, the token that stopped it."""
    tokens = []
    for place in range(num):
        token = (sum(prompt) + place) % 1000
        tokens.append(token)
        if token == EOS or token in stops:
            return tokens, "stop", token
    return tokens, "length", None


class Engine:
    """The part that the stand-ins share: ``hold`` stops the stream after so many tokens until released."""

    def __init__(self, server: StandIn) -> None:
        self.server = server
        self.bodies: list[dict[str, Any]] = []
        self.hold: int | None = None
        self.die: int | None = None
        self.released = asyncio.Event()
        self.num_gone = 0
        self.error: tuple[int, Any] | None = None
        self.num_cached = 48
        self.answer = answer_of

    async def step(self, exchange: Exchange, place: int) -> bool:
        """Before token ``place``; False when the stream ends here."""
        if self.die == place:
            await exchange._writer.drain()
            exchange.reset()
            return False
        if self.hold == place:
            gone = asyncio.ensure_future(exchange.gone.wait())
            released = asyncio.ensure_future(self.released.wait())
            await asyncio.wait({gone, released}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            released.cancel()
        if exchange.gone.is_set():
            self.num_gone += 1
            return False
        return True


def vllm(server: StandIn, *, scale_out: bool = True, **pages: Any) -> Engine:
    """vLLM 0.32."""
    engine = Engine(server)
    server.page("/v1/models", {"data": [{"id": "their/model", "owned_by": "vllm", "max_model_len": 4096}]})
    server.page("/version", {"version": "0.32.0"})
    server.page("/health", b"")
    server.page("/kv_event_sources", pages.get("sources", {}))
    server.page("/metrics", pages.get("metrics", VLLM_METRICS), "text/plain")

    async def generate(exchange: Exchange) -> None:
        if not scale_out:
            exchange.reply({"error": {"message": "Scale-out endpoints are disabled."}}, 403)
            return
        body = exchange.json
        if not body:
            raise Caught("token_ids is required")
        only(body, {"request_id", "model", "token_ids", "sampling_params", "stream", "stream_options"})
        params = body["sampling_params"]
        only(params, SAMPLING | {"detokenize"})
        assert params["detokenize"] is False and body["model"] == "their/model"
        await _vllm_answer(engine, exchange, body, body["token_ids"], params, _generate_choice)

    async def completions(exchange: Exchange) -> None:
        body = exchange.json
        own = {"request_id", "model", "prompt", "stream", "stream_options", "return_token_ids",
               "return_tokens_as_token_ids"}  # fmt: skip
        only(body, SAMPLING | own)
        assert body["return_token_ids"] is True and body["model"] == "their/model"
        await _vllm_answer(engine, exchange, body, body["prompt"], body, _completions_choice)

    server.post("/inference/v1/generate", generate)
    server.post("/v1/completions", completions)
    return engine


async def _vllm_answer(
    engine: Engine,
    exchange: Exchange,
    body: Any,
    prompt: list[int],
    params: Any,
    choice_of: Callable[..., Any],
) -> None:
    engine.bodies.append(body)
    if engine.error is not None:
        exchange.reply(engine.error[1], engine.error[0])
        return
    if len(prompt) > 4096:
        raise Caught(f"maximum context length is 4096 tokens, your prompt has {len(prompt)}")
    num = params.get("max_tokens") or 4096 - len(prompt)
    tokens, reason, stop = engine.answer(prompt, num, params.get("stop_token_ids", []))
    named = (
        stop if stop in params.get("stop_token_ids", []) else None
    )  # the end-of-sequence token is not named
    usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": engine.num_cached}}
    if not body["stream"]:
        choice = choice_of(tokens, params, reason, named)
        rows = [None] + [
            {str(t): {"logprob": -t / 10, "rank": 3}, "7": {"logprob": -0.5, "rank": 1}} for t in prompt[1:]
        ]
        whole: dict[str, Any] = {"choices": [choice], "usage": usage}
        (choice if "prompt" in body else whole)["prompt_logprobs"] = rows
        exchange.reply(whole)
        return
    assert body["stream_options"] == {"include_usage": True}
    exchange.start_stream()
    for place, token in enumerate(tokens):
        if not await engine.step(exchange, place):
            return
        last = place == len(tokens) - 1
        choice = choice_of([token], params, reason if last else None, named if last else None)
        exchange.event({"choices": [choice]})
    exchange.event({"choices": [], "usage": usage})
    exchange.end_stream()


def _generate_choice(tokens: list[int], params: Any, reason: Any, stop: Any) -> Any:
    logprobs = None
    if params.get("logprobs") is not None:
        logprobs = {
            "content": [
                {
                    "token_id": token,
                    "logprob": -1.5,
                    "rank": 2,
                    # the sampled token first, then the best, as vLLM has it
                    "top_logprobs": [{"token_id": token, "logprob": -1.5}, {"token_id": 5, "logprob": -0.5}],
                }
                for token in tokens
            ]
        }
    return {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": reason,
        "stop_reason": stop,
        "logprobs": logprobs,
    }


def _completions_choice(tokens: list[int], params: Any, reason: Any, stop: Any) -> Any:
    logprobs = None
    if params.get("logprobs") is not None:
        assert params["return_tokens_as_token_ids"] is True
        logprobs = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [-1.5 for _ in tokens],
            "top_logprobs": [{f"token_id:{token}": -1.5, "token_id:5": -0.5} for token in tokens],
        }
    return {"index": 0, "text": "x", "token_ids": tokens, "finish_reason": reason, "stop_reason": stop,
            "logprobs": logprobs}  # fmt: skip


VLLM_METRICS = b"""# HELP x y
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 640.0
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 77.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="400"} 1.0
process_start_time_seconds 1.7959871505e+09
"""


def sglang(server: StandIn, *, incremental: bool = False) -> Engine:
    """SGLang; ``incremental``: with --incremental-streaming-output."""
    engine = Engine(server)
    server.page("/v1/models", {"data": [{"id": "their/model", "owned_by": "sglang", "max_model_len": 2048}]})
    server.page("/health", b"")
    server.page("/server_info", {"version": "0.5.9", "page_size": 1, "max_total_num_tokens": 64000,
                                 "max_running_requests": 48, "random_seed": 4711})  # fmt: skip
    server.page("/metrics", b"""sglang:num_running_reqs{x="1"} 4.0
sglang:num_queue_reqs{x="1"} 1.0
sglang:token_usage{x="1"} 0.5
sglang:prompt_tokens_total{x="1"} 500.0
sglang:cached_tokens_total{x="1"} 200.0
sglang:generation_tokens_total{x="1"} 60.0
""", "text/plain")  # fmt: skip

    async def generate(exchange: Exchange) -> None:
        body = exchange.json
        only(body, {"rid", "input_ids", "sampling_params", "stream", "return_logprob", "top_logprobs_num",
                    "logprob_start_len"})  # fmt: skip
        params = body["sampling_params"]
        known = SAMPLING - {"seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"}
        only(params, known | {"max_new_tokens", "min_new_tokens", "no_stop_trim", "sampling_seed"})
        engine.bodies.append(body)
        prompt = body["input_ids"]
        if engine.error is not None:
            exchange.reply(engine.error[1], engine.error[0])
            return
        assert params["top_k"] == -1 or params["top_k"] >= 1
        tokens, _, stop = engine.answer(
            prompt, params["max_new_tokens"] or 50, params.get("stop_token_ids", [])
        )
        exchange.start_stream()
        for place in range(len(tokens)):
            if not await engine.step(exchange, place):
                return
            last = place == len(tokens) - 1
            ending = None
            if last:
                ending = {"type": "stop", "matched": stop} if stop is not None else {"type": "length"}
            since = place if incremental else 0
            meta: dict[str, Any] = {
                "id": body["rid"],
                "finish_reason": ending,
                "prompt_tokens": len(prompt),
                "completion_tokens": place + 1,
                "cached_tokens": engine.num_cached,
            }
            if body.get("return_logprob"):
                shown = tokens[since : place + 1]
                meta["output_token_logprobs"] = [[-1.5, token, None] for token in shown]
                meta["output_top_logprobs"] = [[[-0.5, 5, None], [-1.5, token, None]] for token in shown]
                if body["logprob_start_len"] == 0:
                    meta["input_token_logprobs"] = [
                        [None if not n else -2.5, t, None] for n, t in enumerate(prompt)
                    ]
                    meta["input_top_logprobs"] = [None] + [[[-0.5, 5, None]] for _ in prompt[1:]]
            exchange.event({"text": "x", "output_ids": tokens[since : place + 1], "meta_info": meta})
        exchange.end_stream()

    server.post("/generate", generate)
    return engine


def llama_server(server: StandIn) -> Engine:
    """llama-server, which leaves the tokens inside a character out of its stream: here all even tokens that
    are followed by an odd one."""
    engine = Engine(server)
    server.page("/v1/models", {"data": [{"id": "their.gguf", "owned_by": "llamacpp",
                                         "meta": {"n_vocab": 1000, "n_ctx": 2048}}]})  # fmt: skip
    server.page("/health", {"status": "ok"})
    server.page("/props", {"total_slots": 4, "build_info": "b1", "media_marker": "<__media_x__>",
                           "default_generation_settings": {"n_ctx": 2048}})  # fmt: skip
    server.page("/metrics", b"""llamacpp:prompt_tokens_total 300
llamacpp:prompt_tokens_cached_total 100
llamacpp:tokens_predicted_total 50
llamacpp:requests_processing 2
llamacpp:requests_deferred 1
""", "text/plain")  # fmt: skip
    engine.tokenizes = True  # type: ignore[attr-defined]

    async def completion(exchange: Exchange) -> None:
        body = exchange.json
        only(body, {"prompt", "model", "n_predict", "stream", "return_tokens", "return_progress",
                    "cache_prompt", "temperature", "top_k", "top_p", "min_p", "typical_p",
                    "repeat_penalty", "repeat_last_n",
                    "presence_penalty", "frequency_penalty", "samplers", "ignore_eos", "seed", "logit_bias",
                    "n_probs"})  # fmt: skip
        assert 0 <= body["repeat_last_n"] < 2**31 and 0 <= body["seed"] < 2**32 - 1
        engine.bodies.append(body)
        if engine.error is not None:
            exchange.reply(engine.error[1], engine.error[0])
            return
        prompt = body["prompt"]
        num = body["n_predict"] if body["n_predict"] > 0 else 2000
        tokens, reason, _ = engine.answer(prompt, num, [])
        kind = {"stop": "eos", "length": "limit"}[reason]
        final = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": kind,
                 "tokens_predicted": len(tokens), "timings": {"cache_n": engine.num_cached}}  # fmt: skip
        if not body["stream"]:
            final["tokens"] = tokens
            final["completion_probabilities"] = [
                {"id": token, "logprob": -1.5, "top_logprobs": [{"id": 5, "logprob": -0.5}]}
                for token in tokens
                if not _inside(token, tokens)
            ]
            exchange.reply(final)
            return
        exchange.start_stream()
        if body["return_progress"]:
            progress = {"total": len(prompt), "cache": engine.num_cached}
            exchange.event({"tokens": [0], "tokens_predicted": 0, "stop": False, "prompt_progress": progress})
        text = ""
        for place, token in enumerate(tokens):
            if not await engine.step(exchange, place):
                return
            text += f"<{token}>"
            if _inside(token, tokens):
                continue
            exchange.event({"index": 0, "content": text, "tokens": [token], "stop": False,
                            "tokens_predicted": place + 1})  # fmt: skip
            text = ""
        exchange.event(final)
        exchange.raw(b"0\r\n\r\n")

    async def tokenize(exchange: Exchange) -> None:
        body = exchange.json
        assert body["add_special"] is False and body["parse_special"] is False
        ids = [int(part.strip("<")) for part in body["content"].split(">") if part]
        exchange.reply({"tokens": ids if engine.tokenizes else ids[:1]})  # type: ignore[attr-defined]

    server.post("/completion", completion)
    server.post("/tokenize", tokenize)
    return engine


def _inside(token: int, tokens: list[int]) -> bool:
    return token >= 500 and not token % 2 and token + 1 in tokens


def tensorrt_llm(server: StandIn) -> Engine:
    """trtllm-serve."""
    engine = Engine(server)
    server.page("/v1/models", {"data": [{"id": "their/model", "owned_by": "tensorrt_llm"}]})
    server.page("/version", {"version": "1.4.0"})
    server.page("/health", b"")
    cache = {"maxNumBlocks": 100, "freeNumBlocks": 60}
    newest = {"numActiveRequests": 5, "numQueuedRequests": 2, "kvCacheStats": cache}
    server.page("/metrics", [{"numActiveRequests": 1}, newest])

    async def completions(exchange: Exchange) -> None:
        body = exchange.json
        only(body, (SAMPLING - {"logprobs", "prompt_logprobs"})
             | {"model", "prompt", "stream", "stream_options", "detokenize"})  # fmt: skip
        assert body["detokenize"] is False and body["model"] == "their/model"
        params = dict(body)
        await _vllm_answer(engine, exchange, body, body["prompt"], params, _completions_choice)

    server.post("/v1/completions", completions)
    return engine
