"""The offline API on tiny random models: vLLM's names and result shapes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helios.engine.llm import LLM, CompletionOutput, RequestOutput
from helios.engine.worker import EngineDead
from helios.model.config import ModelError
from helios.model.params import RequestError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"device": "cpu", "dtype": "float32", "kv_pages": 32, "debug_checks": True, **options})


@pytest.fixture(scope="module")
def llm(tiny_folder: Callable[[str], Path]) -> Iterator[LLM]:
    with load(tiny_folder("qwen3")) as model:
        yield model


def worker_threads() -> int:
    return sum(thread.name == "helios-engine" for thread in threading.enumerate())


def test_a_result_has_vllms_shape(llm: LLM) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert isinstance(output, RequestOutput) and output.finished
    assert output.prompt == "hello" and output.prompt_token_ids == llm.get_tokenizer().encode("hello")
    (choice,) = output.outputs
    assert isinstance(choice, CompletionOutput)
    assert choice.index == 0 and len(choice.token_ids) == 8
    assert choice.finish_reason == "length" and choice.stop_reason is None
    assert choice.logprobs is None and choice.cumulative_logprob is None
    assert choice.text == llm.get_tokenizer().decode(choice.token_ids)


def test_every_way_to_give_a_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc")
    forms: list[Any] = ["abc", ["abc"], ids, [ids], {"prompt": "abc"}, [{"prompt_token_ids": ids}]]
    answers = [llm.generate(form, GREEDY)[0] for form in forms]
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    assert [answer.prompt for answer in answers] == ["abc", "abc", None, None, "abc", None]
    with pytest.raises(RequestError, match="prompt_token_ids"):
        llm.generate({"text": "abc"}, GREEDY)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 5, ignore_eos=True) for i in range(12)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 5 for i in range(12)]
    assert len({output.request_id for output in outputs}) == 12
    alone = [llm.generate(prompt, p)[0].outputs[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    assert [output.outputs[0].token_ids for output in outputs] == alone


def test_one_parameter_set_for_each_prompt_or_one_for_all(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts but 1 sampling"):
        llm.generate(["a", "b"], [GREEDY])


def test_more_prompts_than_may_wait(tiny_folder: Callable[[str], Path]) -> None:
    with load(tiny_folder("qwen3"), max_waiting=2, max_batch_size=3) as small:
        outputs = small.generate([f"p{i}" for i in range(20)], SamplingParams(max_tokens=2, ignore_eos=True))
        assert [output.prompt for output in outputs] == [f"p{i}" for i in range(20)]


def test_choices_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=4, seed=1, logprobs=2, ignore_eos=True)
    (output,) = llm.generate("xyz", params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    for choice in output.outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == 4
        chosen = [entry[token] for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
        for entry in choice.logprobs:
            assert len(entry) in (2, 3)
            likeliest = max(entry.values(), key=lambda e: e.logprob)
            assert likeliest.rank == 1 and likeliest.decoded_token is not None


def test_a_seed_repeats_and_batches_do_not_matter(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=7, ignore_eos=True)
    first = llm.generate("seeded", params)[0].outputs[0].token_ids
    crowd = llm.generate(["noise", "seeded", "more noise"], params)
    assert crowd[1].outputs[0].token_ids == first


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    full = llm.generate("hello", params)[0].outputs[0]
    stop = full.text[3:5]
    cut = llm.generate("hello", replace(params, stop=stop))[0].outputs[0]
    assert cut.finish_reason == "stop" and cut.stop_reason == stop
    assert cut.text == full.text[: full.text.index(stop)]
    assert len(cut.token_ids) < 40 and cut.token_ids == full.token_ids[: len(cut.token_ids)]


def test_a_stop_token_is_told_and_not_shown(llm: LLM) -> None:
    full = llm.generate("hello", GREEDY)[0].outputs[0]
    token = full.token_ids[4]
    at = full.token_ids.index(token)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=[token])
    cut = llm.generate("hello", params)[0].outputs[0]
    assert cut.finish_reason == "stop" and cut.stop_reason == token
    assert cut.token_ids == full.token_ids[: at + 1]
    assert cut.text == llm.get_tokenizer().decode(full.token_ids[:at])


def test_chat_is_the_template_and_then_generate(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().encode_chat(messages)
    assert len(llm.chat([messages, messages, messages], GREEDY)) == 3
    assert (
        "".join(llm.stream_chat(messages, max_tokens=8, temperature=0.0))
        == llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text
    )


def test_leaving_a_stream_ends_the_request(llm: LLM) -> None:
    for _ in llm.stream_chat([{"role": "user", "content": "hi"}], max_tokens=1500):
        break
    gc.collect()
    llm.generate("next", GREEDY)
    assert llm._scheduler.stats()["running"] == 0


def test_the_same_prompt_again_comes_from_the_cache(llm: LLM) -> None:
    prompt = [i % 200 for i in range(600)]
    first, second = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 512)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_a_prompt_that_cannot_fit_stops_all_before_anything_runs(llm: LLM) -> None:
    before = llm._scheduler.stats()["submitted"]
    with pytest.raises(RequestError, match="context"):
        llm.generate([[1, 2, 3], list(range(200)) * 20], GREEDY)
    assert llm._scheduler.stats()["submitted"] == before


def test_defaults_are_the_models_own(tiny_folder: Callable[[str], Path], llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    llm._defaults = {"temperature": 0.6, "top_k": 20.0}
    try:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)
    finally:
        llm._defaults = {}


def test_an_interrupt_cancels_everything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: LLM, job: Any, prompt: str | None) -> RequestOutput:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"] * 4, SamplingParams(max_tokens=1500, ignore_eos=True))
    monkeypatch.undo()
    llm.generate("next", GREEDY)
    stats = llm._scheduler.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["cancelled"] >= 4


def test_vllms_option_names_and_unknown_ones(tiny_folder: Callable[[str], Path]) -> None:
    with load(tiny_folder("qwen3"), max_model_len=64, max_num_seqs=2) as small:
        assert small.config.max_context == 64 and small.config.max_batch_size == 2
        with pytest.raises(RequestError):
            small.generate([list(range(60))], GREEDY)
    with pytest.raises(TypeError, match="tensor_parallel"):
        LLM("smollm2", tensor_parallel_size=2)


def test_a_missing_model_says_what_to_do(tmp_path: Path) -> None:
    before = worker_threads()
    with pytest.raises(ModelError):
        LLM(str(tmp_path / "nothing here"))
    assert worker_threads() == before


def test_close_ends_the_thread(tiny_folder: Callable[[str], Path]) -> None:
    before = worker_threads()
    model = load(tiny_folder("qwen3"))
    assert worker_threads() == before + 1
    model.close()
    model.close()
    assert worker_threads() == before
    with pytest.raises(EngineDead):
        model.generate("late", GREEDY)


def test_a_forgotten_llm_frees_its_thread(tiny_folder: Callable[[str], Path]) -> None:
    before = worker_threads()
    model = load(tiny_folder("qwen3"))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and worker_threads() == before


def test_what_is_no_prompt_is_refused_in_a_sentence(llm: LLM) -> None:
    for wrong in ([[1.5, 2.7]], [[True, False]], [b"abc"], [{"prompt": 5}], [["a", "b"]], [{}]):
        with pytest.raises(RequestError, match="token ids|prompt"):
            llm.generate(wrong, GREEDY)
    with pytest.raises(TypeError, match="SamplingParams"):
        llm.generate("a", {"max_tokens": 1})  # type: ignore[arg-type]


def test_numpy_ids_are_ids(llm: LLM) -> None:
    import numpy as np

    plain = llm.generate([[65, 66, 67]], GREEDY)[0].outputs[0].token_ids
    assert llm.generate(np.array([65, 66, 67]), GREEDY)[0].outputs[0].token_ids == plain  # type: ignore[arg-type]


def test_an_option_under_two_names_is_refused() -> None:
    with pytest.raises(TypeError, match="two names"):
        LLM("anything", max_context=5, max_model_len=7)
