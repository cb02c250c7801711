"""wedlm-nano and the hybrid that it becomes: their files and answers, their tokenizer, and their tasks."""

import json
import subprocess
import sys

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nano_tasks import TASKS, generate_samples, is_heldout, main
from nano_tokenizer import train_tokenizer
from oracle import decode
from tiny import script
from transformers import AutoTokenizer

from wedlm_hf.checkpoints import NANO
from wedlm_hf.eval.measure import measure
from wedlm_hf.eval.prompts import encode, encode_prompt
from wedlm_hf.generation.state import keeps_state


def heldout(count=1, seed=3, tasks=TASKS):
    return [sample for task in tasks for sample in generate_samples(task, count, seed, "heldout")]


# --- the checkpoint -------------------------------------------------------------------------------------------------


def test_it_is_small_has_room_for_512_tokens_and_names_no_code_so_its_tokenizer_loads_without_this_package(nano):
    model, tokenizer = nano
    assert sum(path.stat().st_size for path in NANO.rglob("*") if path.is_file()) <= 10 * 2**20
    assert not list(NANO.glob("*_wedlm.py")) and not list(NANO.glob("*.bin"))
    assert all("auto_map" not in json.loads(file.read_text()) for file in NANO.glob("*config.json"))
    assert model.config.max_position_embeddings >= 512 and tokenizer.model_max_length >= 512
    load = "import sys; from transformers import AutoTokenizer; assert 'wedlm_hf' not in sys.modules; "
    load += f"print(AutoTokenizer.from_pretrained({str(NANO)!r}).mask_token_id)"
    done = subprocess.run([sys.executable, "-c", load], input="", capture_output=True, text=True, check=True)
    assert int(done.stdout) == tokenizer.mask_token_id == model.config.mask_token_id


@pytest.mark.parametrize(("window_size", "tau", "lam"), [(4, 1.5, 0.02), (16, 0.3, 0.02)])
def test_greedy_decoding_equals_the_oracle_on_trained_weights(nano, window_size, tau, lam):
    model, tokenizer = nano
    ids = {"mask_id": tokenizer.mask_token_id, "eos_ids": [tokenizer.eos_token_id]}
    options = {"window_size": window_size, "entropy_threshold": tau, "distance_penalty": lam, "max_new_tokens": 32}
    for prompt in (encode(tokenizer, sample.messages) for sample in heldout()):
        expected, forwards, _ = decode(model, prompt, window_size=window_size, tau=tau, lam=lam, limit=32, **ids)
        how = options | {"strategy": "wedlm", "return_dict_in_generate": True}
        output = model.generate(torch.tensor([prompt]), **how)
        assert output.sequences[0, len(prompt) :].tolist() == expected and output.stats.forwards.item() == forwards


def test_it_answers_held_out_prompts_in_parallel_with_its_stored_settings(nano):
    prompts = [encode_prompt(*nano, each) for each in heldout(8, 4, ("counting", "arithmetic", "sorting", "json"))]
    decoders = {name: {"strategy": name, "max_new_tokens": 160, "do_sample": False} for name in ("ar", "wedlm")}
    rows = pd.DataFrame(measure(*nano, prompts, decoders, batch_size=8)).groupby("decoder")
    right, sums = rows["right"].mean(), rows[["new_tokens", "forwards"]].sum()
    assert right["ar"] >= 0.85 and right["wedlm"] >= 0.8
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
    train.main(tmp_path, steps=2, batch_size=1)
    found = train.Qwen3_5ForCausalLM.from_pretrained(tmp_path)
    train.set_seed(0)
    weights = train.build_model(tokenizer).state_dict().items()
    changed = {name for name, weight in weights if not torch.equal(weight, found.state_dict()[name])}
    assert keeps_state(found) and changed and all(".linear_attn." in name for name in changed)


# --- the tokenizer --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts():
    return [text for task in TASKS for each in generate_samples(task, 300, 0) for text in (each.text, each.answers[0])]


@pytest.fixture(scope="module")
def trained(texts):
    return train_tokenizer(texts, 1024)


CONVERSATION = [
    {"role": role, "content": content}
    for role, content in zip(
        ("system", "user", "assistant", "user", "assistant"),
        ("Be brief.", "Count to 3.", "1, 2, 3", "Now code.", "    return 3\n"),
        strict=True,
    )
]


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


def test_training_twice_gives_the_same_files_and_a_loaded_tokenizer_is_the_trained_one(trained, texts, tmp_path):
    train_tokenizer(iter(texts), 1024).save_pretrained(tmp_path / "again")
    trained.save_pretrained(tmp_path / "first")
    first, again = ({file.name: file.read_bytes() for file in (tmp_path / x).iterdir()} for x in ("first", "again"))
    assert first == again
    loaded = AutoTokenizer.from_pretrained(tmp_path / "first")
    rows = [dict(each.apply_chat_template(CONVERSATION, return_dict=True)) for each in (trained, loaded)]
    assert rows[0] == rows[1]
    ids = loaded.pad_token_id, loaded.eos_token_id, loaded.mask_token_id
    assert (*ids, loaded.padding_side, loaded.model_max_length) == (0, 2, 3, "left", 512)


# --- the tasks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_splits_are_disjoint_and_every_sample_ends_with_the_user_and_has_a_correct_answer(task):
    found = list(generate_samples(task, 400, 0, "heldout"))
    assert not any(is_heldout(sample.text) for sample in generate_samples(task, 800, 0, "train"))
    assert all(is_heldout(sample.text) for sample in found) and len({sample.text for sample in found}) == len(found)
    for sample in found:
        roles, (answer, *_) = [message["role"] for message in sample.messages], sample.answers
        assert roles in (["user"], ["user", "assistant", "user"]) and sample.task == task
        assert answer.isascii() and sample.score(answer) == 1 and sample.score("") == 0
        assert sample.score(answer + " and so on") == (task in ("arithmetic", "json"))


def test_the_prompts_beside_the_checkpoint_are_what_the_script_writes(tmp_path, capsys):
    """Each answer as it was checked when they were stored."""
    main(tmp_path / "tasks.jsonl")
    assert (tmp_path / "tasks.jsonl").read_text(encoding="utf-8") == (NANO / "tasks.jsonl").read_text(encoding="utf-8")
    assert capsys.readouterr().out.endswith("tasks.jsonl: 780 samples\n")
