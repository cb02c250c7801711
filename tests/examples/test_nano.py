"""wedlm-nano and the hybrid that it becomes: their files and answers, the tokenizer that they share, and their tasks,
whose answers are recomputed from the text of the prompts."""

import ast
import json
import re
import subprocess
import sys

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nano_tasks import TASKS, generate_samples, is_heldout, main
from nano_tokenizer import train_tokenizer
from oracle import decode
from tiny import script
from transformers import AutoModelForCausalLM, AutoTokenizer

from wedlm_hf import load_mask_adapter
from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_tokenizer
from wedlm_hf.eval.measure import measure
from wedlm_hf.eval.prompts import encode, encode_prompt
from wedlm_hf.generation.state import keeps_state

HYBRID = NANO.parent / "wedlm-nano-hybrid"


def heldout(count=1, seed=3, tasks=TASKS):
    return [sample for task in tasks for sample in generate_samples(task, count, seed, "heldout")]


# --- the checkpoint -------------------------------------------------------------------------------------------------


def test_it_is_small_has_room_for_512_tokens_and_names_no_code_so_its_tokenizer_loads_without_this_package(nano):
    model, tokenizer = nano
    assert sum(path.stat().st_size for path in NANO.rglob("*") if path.is_file()) <= 10 * 2**20
    assert not list(NANO.glob("*_wedlm.py")) and not list(NANO.glob("*.bin"))
    assert all("auto_map" not in json.loads(file.read_text()) for file in NANO.glob("*config.json"))
    assert model.config.max_position_embeddings >= 512 and tokenizer.model_max_length >= 512
    assert model.config.mask_token_id == tokenizer.mask_token_id
    load = "import sys; from transformers import AutoTokenizer; assert 'wedlm_hf' not in sys.modules; "
    load += f"print(AutoTokenizer.from_pretrained({str(NANO)!r}).mask_token_id)"
    done = subprocess.run([sys.executable, "-c", load], input="", capture_output=True, text=True, check=True)
    assert done.stdout == f"{load_tokenizer(NANO).mask_token_id}\n"


@pytest.mark.parametrize(("window_size", "tau", "lam"), [(4, 1.5, 0.02), (16, 0.3, 0.02)])
def test_greedy_decoding_equals_the_oracle_on_trained_weights(nano, window_size, tau, lam):
    model, tokenizer = nano
    for prompt in (encode(tokenizer, sample.messages) for sample in heldout()):
        ids = {"mask_id": tokenizer.mask_token_id, "eos_ids": [tokenizer.eos_token_id]}
        expected, forwards, _ = decode(model, prompt, window_size=window_size, tau=tau, lam=lam, limit=32, **ids)
        settings = {"window_size": window_size, "entropy_threshold": tau, "distance_penalty": lam}
        options = {"strategy": "wedlm", "max_new_tokens": 32, "return_dict_in_generate": True}
        output = model.generate(torch.tensor([prompt]), **settings, **options)
        assert output.sequences[0, len(prompt) :].tolist() == expected
        assert output.stats.forwards.item() == forwards


def test_it_answers_held_out_prompts_in_parallel_with_its_stored_settings(nano):
    prompts = [encode_prompt(*nano, each) for each in heldout(15, 4, ("counting", "arithmetic", "sorting", "json"))]
    decoders = {name: {"strategy": name, "max_new_tokens": 160, "do_sample": False} for name in ("ar", "wedlm")}
    rows = pd.DataFrame(measure(*nano, prompts, decoders, batch_size=15)).groupby("decoder")
    right, sums = rows["right"].mean(), rows[["new_tokens", "forwards"]].sum()
    assert right["ar"] >= 0.85
    assert right["wedlm"] >= 0.8
    assert sums["new_tokens"]["wedlm"] / sums["forwards"]["wedlm"] >= 1.8


# --- the hybrid -----------------------------------------------------------------------------------------------------


def test_with_attention_in_every_layer_the_hybrid_is_nano_and_its_mixers_learn_by_themselves_first(
    nano, tmp_path, monkeypatch
):
    model, tokenizer = nano
    train = script("examples/wedlm-nano-hybrid/train.py")
    whole = train.build_model(tokenizer, ["full_attention"] * 4).eval()
    ids = torch.randint(4, len(tokenizer), (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(whole(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-3, rtol=0)
    monkeypatch.setattr(train, "ALONE", 1.0)
    monkeypatch.setattr(train, "PROMPTS", 2)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)  # for the whole process
    train.main(tmp_path, steps=2, batch_size=2)
    found = train.Qwen3_5ForCausalLM.from_pretrained(tmp_path)
    train.set_seed(0)
    weights = train.build_model(tokenizer).state_dict().items()
    changed = {name for name, weight in weights if not torch.equal(weight, found.state_dict()[name])}
    assert keeps_state(found) and changed and all(".linear_attn." in name for name in changed)


def test_the_hybrid_answers_held_out_prompts_as_ar_does_in_fewer_forwards(nano):
    model = AutoModelForCausalLM.from_pretrained(HYBRID, dtype=torch.float32).eval()
    load_mask_adapter(model, HYBRID / "adapter")
    options = {"max_new_tokens": 128, "do_sample": False, "return_dict_in_generate": True}
    tokens = forwards = 0
    for sample in heldout(2):
        ids = torch.tensor([encode(nano[1], sample.messages)])
        output = model.generate(ids, strategy="wedlm", verification="exact", slot_cost=0.01, **options)
        assert torch.equal(output.sequences, model.generate(ids, strategy="ar", **options).sequences)
        tokens, forwards = tokens + output.stats.new_tokens.item(), forwards + output.stats.forwards.item()
    assert tokens / forwards > 2.5


# --- the tokenizer --------------------------------------------------------------------------------------------------


def task_texts():
    return [text for task in TASKS for s in generate_samples(task, 300, 0) for text in (s.text, s.answers[0])]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(task_texts(), 1024)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Count to 3."},
    {"role": "assistant", "content": "1, 2, 3"},
    {"role": "user", "content": "Now code."},
    {"role": "assistant", "content": "    return 3\n"},
]


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_is_decoded_without_loss(trained, text):
    assert trained.decode(trained(text)["input_ids"]) == text


def test_each_digit_and_each_newline_is_a_token_and_every_sample_of_the_tasks_fits_into_384(trained):
    assert trained.tokenize("7+5+0=12\n\n") == [*"7+5+0=12", "Ċ", "Ċ"]
    assert not [token for token in trained.get_vocab() if len(token) > 1 and any(c.isdigit() for c in token)]
    for sample in (each for task in TASKS for each in generate_samples(task, 100, 5, "train")):
        turns = [*sample.messages, {"role": "assistant", "content": sample.answers[0]}]
        assert len(trained.apply_chat_template(turns, return_dict=True)["input_ids"]) <= 384


def test_the_template_is_chatml_marks_every_answer_with_its_end_and_begins_it_with_the_generation_prompt(trained):
    text = trained.apply_chat_template(CONVERSATION[1:3], tokenize=False)
    assert text == "<|im_start|>user\nCount to 3.<|im_end|>\n<|im_start|>assistant\n1, 2, 3<|im_end|>\n"
    row = trained.apply_chat_template(CONVERSATION, return_assistant_tokens_mask=True, return_dict=True)
    kept = [token for token, kept in zip(row["input_ids"], row["assistant_masks"], strict=True) if kept]
    assert trained.decode(kept) == "1, 2, 3<|im_end|>    return 3\n<|im_end|>"
    prompt = trained.apply_chat_template(CONVERSATION[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    for answer in ("1, 2", "    return 3", "\nx", " - y"):
        turns = [*CONVERSATION[:2], {"role": "assistant", "content": answer}]
        assert trained.apply_chat_template(turns, return_dict=True)["input_ids"][: len(prompt)] == prompt


def test_training_twice_gives_the_same_bytes_and_a_loaded_tokenizer_behaves_like_the_trained_one(trained, tmp_path):
    train_tokenizer(iter(task_texts()), 1024).save_pretrained(tmp_path / "again")
    trained.save_pretrained(tmp_path / "first")
    first, again = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("first", "again")
    )
    assert first == again
    loaded = AutoTokenizer.from_pretrained(tmp_path / "first")
    rows = [dict(each.apply_chat_template(CONVERSATION, return_dict=True)) for each in (trained, loaded)]
    assert rows[0] == rows[1]
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.mask_token_id) == (0, 2, 3)
    assert (loaded.padding_side, loaded.model_max_length) == ("left", 512)


# --- the tasks ------------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def samples(task, count=400, split="heldout"):
    return list(generate_samples(task, count, 0, split))


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_and_every_sample_ends_with_the_user_and_has_a_correct_answer(task):
    heldout = samples(task, 1000)
    assert not any(is_heldout(sample.text) for sample in samples(task, 2000, "train"))
    assert all(is_heldout(sample.text) for sample in heldout)
    assert len({sample.text for sample in heldout}) == len(heldout)
    for sample in heldout[:400]:
        roles = [message["role"] for message in sample.messages]
        assert roles in (["user"], ["user", "assistant", "user"])
        assert sample.task == task
        assert sample.answers[0].isascii()
        assert sample.is_right(sample.answers[0])
        assert not sample.is_right("")
        assert task == "arithmetic" or not sample.is_right(sample.answers[0] + " and so on")


def test_counting_answers_follow_from_the_numbers_of_the_prompt():
    for sample in samples("counting"):
        given, terms = numbers(sample.text), numbers(sample.answers[0])
        if sample.text.startswith("Continue"):
            *shown, last = given
            step = shown[1] - shown[0]
            first = shown[-1] + step
        else:
            first, last, step = (given[0], given[2], given[1]) if "until" in sample.text else given
            step = step if first < last else -step
            assert (step < 0) == ("down" in sample.text)
        assert terms == list(range(first, last + (1 if step > 0 else -1), step))
        assert ", ".join(map(str, terms)) == sample.answers[0]


def test_arithmetic_working_is_true_line_by_line_and_ends_in_the_answer_of_the_story():
    operations = set()
    for sample in samples("arithmetic"):
        *working, last = sample.answers[0].split("\n")
        results = []
        for line in working:
            if "=" in line:
                left, right = line.split("=")
                assert eval_columns(left) == int(right), line
            else:
                left, operator, right = re.fullmatch(r"(\d{3})(?:([-+*])(\d+))?", line).groups()
                assert not results or int(left) == results[-1], line
                if operator:
                    operations.add(operator)
                    results.append(eval_columns(line))
        assert last == f"Answer: {results[-1]}" == f"Answer: {story_total(sample.text)}"
        assert 0 <= results[-1] <= 999
    assert operations == {"+", "-", "*"}


def eval_columns(expression: str) -> int:
    """Value of an expression whose numbers may carry leading zeros."""
    return eval(re.sub(r"\b0+(?=\d)", "", expression), {})


def story_total(story: str) -> int:
    """The story's answer by its words alone."""
    first, *events = story.split(". ")[:-1]
    if events and "Each" in events[0]:
        first += events.pop(0)
    total = 1
    for number in numbers(first):
        total *= number
    for event in events:
        loss = any(word in event for word in ("sells", "loses", "gives", "takes"))
        total += -numbers(event)[0] if loss else numbers(event)[0]
    return total


def test_sorting_answers_are_the_sorted_items_of_the_prompt():
    kinds = set()
    for sample in samples("sorting"):
        order, items = sample.text.split(": ")
        values = [int(item) if item.isdigit() else item for item in items.split(", ")]
        down = any(word in order for word in ("descending", "largest to", "falling", "Z to A", "reverse"))
        assert sample.answers[0] == ", ".join(map(str, sorted(values, reverse=down)))
        assert len(set(values)) == len(values) >= 3
        kinds.add((type(values[0]), down))
    assert len(kinds) == 4


def test_json_answers_hold_the_numbers_of_the_prompt_and_python_answers_complete_its_code():
    for sample in samples("json"):
        assert sample.answers[0] == json.dumps(json.loads(sample.answers[0]))
        assert sorted(numbers(sample.answers[0])) == sorted(numbers(sample.text))
    for sample in samples("python"):
        ast.parse(sample.text.split("\n", 1)[1] + "\n" + sample.answers[0])


def test_the_prompts_beside_the_checkpoint_are_what_the_script_writes(tmp_path, capsys):
    main(tmp_path / "tasks.jsonl")
    assert (tmp_path / "tasks.jsonl").read_text(encoding="utf-8") == (NANO / "tasks.jsonl").read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith("tasks.jsonl: 780 samples\n")
