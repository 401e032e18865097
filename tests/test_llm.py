"""The Python interface, with a tiny model and a tokenizer made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace import LLM, SamplingParams
from headrace.core.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PackError,
    UsageError,
)
from headrace.core.messages import Failed
from headrace.engine.engine import StepResult
from tests.models.tiny import make_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level vocabulary: <bos>, <eos>, 256 bytes."""
    path = make_tiny("llama", tmp_path_factory.mktemp("llm"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1, **{letter: i + 2 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE, "model_max_length": 512}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", threads=1, kv_cache_gib=0.02, block_size=4, seed=1)


def test_every_form_of_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc").tolist()
    [text] = llm.generate("abc", GREEDY)
    assert (text.prompt, text.prompt_token_ids, text.finished) == ("abc", ids, True)
    [sample] = text.outputs
    assert (sample.index, len(sample.token_ids), sample.finish_reason) == (0, 8, "length")
    assert sample.text == llm.tokenizer.decode(sample.token_ids)
    assert sample.logprobs is None and sample.cumulative_logprob is None
    forms = [["abc"], ids, [ids], {"prompt": "abc"}, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]]
    for form in forms:
        [output] = llm.generate(form, GREEDY)  # type: ignore[arg-type]
        assert output.outputs[0].token_ids == sample.token_ids
    several = llm.generate(
        ["abc", ids, "xyz"], [GREEDY, SamplingParams(temperature=0.0, max_tokens=2), GREEDY]
    )
    assert [output.prompt for output in several] == ["abc", None, "xyz"]
    assert several[1].outputs[0].token_ids == sample.token_ids[:2]
    assert llm.generate([]) == []


def test_stop_strings_cut_the_text(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    whole = llm.generate("hello", long)[0].outputs[0].text
    stop = whole[5:7]
    at = whole.index(stop)
    for form in (stop, [stop, "never seen"]):
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=form)  # type: ignore[arg-type]
        [sample] = llm.generate("hello", params)[0].outputs
        assert (sample.text, sample.finish_reason, sample.stop_reason) == (whole[:at], "stop", stop)
        assert len(sample.token_ids) < 40
    assert not llm.engine.has_work


def test_none_means_no_stops_as_in_vllm(llm: LLM) -> None:
    plain = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    params = SamplingParams(**options, stop=None, stop_token_ids=None)
    assert llm.generate("abc", params)[0].outputs[0].token_ids == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", None),
        ("n", 1.5),
        ("stop", 3),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("logit_bias", [1]),
        ("max_tokens", "8"),
        ("seed", "x"),
    ],
)
def test_a_wrong_type_names_its_field(llm: LLM, name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    for ask in (
        lambda params: llm.generate("abc", params),
        lambda params: llm.chat([{"role": "user", "content": "a"}], params),
    ):
        with pytest.raises(InvalidRequestError, match=name) as caught:
            ask(SamplingParams(**options))
        assert caught.value.param == name
    assert not llm.engine.has_work


@pytest.mark.parametrize("params", [{"temperature": 0}, 3, ["x"]])
def test_what_is_no_sampling_params_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="SamplingParams") as caught:
        llm.generate(["abc"], params)
    assert caught.value.param == "sampling_params"


def test_a_failure_in_the_engine_keeps_its_type(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> StepResult:
        request_id = next(iter(added))
        return StepResult([], [Failed.of_error(request_id, OverloadedError("full"))])

    added: list[str] = []
    add = llm.engine.add
    monkeypatch.setattr(
        llm.engine, "add", lambda request: (added.append(request.request_id), add(request))[1]
    )
    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(OverloadedError, match="full"):
        llm.generate("abc", GREEDY)
    assert not llm.engine.has_work


def test_logprobs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1, n=2, seed=3)
    [output] = llm.generate("abcd", params)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for sample in output.outputs:
        assert sample.logprobs is not None and len(sample.logprobs) == 5
        chosen = [entry[token] for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        assert sample.cumulative_logprob == pytest.approx(sum(c.logprob for c in chosen))
        for entry in sample.logprobs:
            assert 2 <= len(entry) <= 3
            by_rank = sorted(entry.values(), key=lambda found: found.rank or 0)
            assert [found.logprob for found in by_rank] == sorted((f.logprob for f in by_rank), reverse=True)
    assert output.outputs[0].token_ids != output.outputs[1].token_ids


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(messages, GREEDY)
    prompt = llm.tokenizer.decode(output.prompt_token_ids)
    assert prompt == "[user]hi>"
    both = llm.chat([messages, [*messages, {"role": "assistant", "content": "yo"}]], GREEDY)
    assert both[0].outputs == output.outputs
    assert llm.tokenizer.decode(both[1].prompt_token_ids) == "[user]hi[assistant]yo>"
    [open_ended] = llm.chat(messages, GREEDY, add_generation_prompt=False)
    assert llm.tokenizer.decode(open_ended.prompt_token_ids) == "[user]hi"


def test_a_prefix_is_found_again(llm: LLM) -> None:
    prompt = "a long and shared beginning"
    llm.generate(prompt, GREEDY)
    [again] = llm.generate(prompt + "!", GREEDY)
    assert again.num_cached_tokens >= 24


def test_mistakes_leave_nothing_behind(llm: LLM, folder: Path) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", "x" * 600], GREEDY)
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.generate(["fine", "fine"], [GREEDY, SamplingParams(temperature=-1.0)])
    with pytest.raises(InvalidRequestError, match="2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        llm.generate({"prompts": "abc"}, GREEDY)
    with pytest.raises(InvalidRequestError, match="token ids"):
        llm.generate([[2, -1]], GREEDY)
    assert not llm.engine.has_work
    llm.engine.check_integrity()
    with pytest.raises(UsageError, match="tensor_parallel_size"):
        LLM(str(folder), tensor_parallel_size=2)
    with pytest.raises(UsageError, match="block_size"):
        LLM(str(folder), block_size=0)
    with pytest.raises(ModelNotFoundError):
        LLM(str(folder / "nothing"))


def test_a_disk_tier_outlives_its_llm(folder: Path, tmp_path: Path) -> None:
    knobs = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_gib": 0.02, "block_size": 4}
    disk = {"kv_disk_gb": 0.1, "kv_disk_path": str(tmp_path / "kv")}
    prompt = "once upon a time, and twice more, " * 4
    with LLM(str(folder), **knobs, **disk) as first:
        [written] = first.generate(prompt, GREEDY)
    with LLM(str(folder), **knobs, **disk) as second:
        [found] = second.generate(prompt, GREEDY)
    assert found.outputs[0].token_ids == written.outputs[0].token_ids
    assert written.num_cached_tokens == 0 and found.num_cached_tokens > len(found.prompt_token_ids) - 8


def test_a_pack_that_no_trusted_key_signed_is_not_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="is no signed pack"):
        LLM(str(folder), pack=str(tmp_path))
    (tmp_path / "pack.json").write_text("{}")
    (tmp_path / "signature.json").write_text('{"key": "0123456789abcdef", "signature": "00"}')
    with pytest.raises(PackError, match="key 0123456789abcdef, is not trusted here"):
        LLM(str(folder), pack=str(tmp_path))
