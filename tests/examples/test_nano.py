"""The checkpoint in the repository: its files, its answers, and decoding on trained weights."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from nano_tasks import TASKS, generate_samples
from oracle import decode

from wedlm_hf.checkpoints import NANO
from wedlm_hf.checkpoints.loading import load_tokenizer
from wedlm_hf.eval.measure import measure
from wedlm_hf.eval.prompts import encode, encode_prompt


def prompts(tokenizer, seed=3):
    return [
        encode(tokenizer, sample.messages) for task in TASKS for sample in generate_samples(task, 1, seed, "heldout")
    ]


def test_it_names_no_code_so_its_tokenizer_loads_unasked_without_this_package():
    assert not list(NANO.glob("*_wedlm.py"))
    load = "import sys; from transformers import AutoTokenizer; assert 'wedlm_hf' not in sys.modules; "
    load += f"print(AutoTokenizer.from_pretrained({str(NANO)!r}).mask_token_id)"
    done = subprocess.run([sys.executable, "-c", load], input="", capture_output=True, text=True, check=True)
    assert done.stdout == f"{load_tokenizer(NANO).mask_token_id}\n"


def test_it_is_small_and_has_room_for_512_tokens(nano):
    model, tokenizer = nano
    assert sum(path.stat().st_size for path in NANO.rglob("*") if path.is_file()) <= 10 * 2**20
    assert not list(Path(NANO).glob("*.bin"))
    assert model.config.max_position_embeddings >= 512 and tokenizer.model_max_length >= 512
    assert model.config.mask_token_id == tokenizer.mask_token_id


def test_it_is_small_and_names_no_code_so_that_its_tokenizer_loads_unasked_without_this_package():
    assert sum(path.stat().st_size for path in NANO.rglob("*") if path.is_file()) <= 10 * 2**20
    assert not list(NANO.glob("*_wedlm.py")) and not list(NANO.glob("*.bin"))
    assert all("auto_map" not in json.loads(file.read_text()) for file in NANO.glob("*config.json"))


@pytest.mark.parametrize(("window_size", "tau", "lam"), [(4, 1.5, 0.02), (16, 0.3, 0.02)])
def test_greedy_decoding_equals_the_oracle_on_trained_weights(nano, window_size, tau, lam):
    model, tokenizer = nano
    for prompt in prompts(tokenizer):
        ids = {"mask_id": tokenizer.mask_token_id, "eos_ids": [tokenizer.eos_token_id]}
        expected, forwards, _ = decode(model, prompt, window_size=window_size, tau=tau, lam=lam, limit=32, **ids)
        settings = {"window_size": window_size, "entropy_threshold": tau, "distance_penalty": lam}
        options = {"strategy": "wedlm", "max_new_tokens": 32, "return_dict_in_generate": True}
        output = model.generate(torch.tensor([prompt]), **settings, **options)
        assert output.sequences[0, len(prompt) :].tolist() == expected
        assert output.stats.forwards.item() == forwards


def test_it_answers_held_out_prompts_in_parallel_with_its_stored_settings(nano):
    model, tokenizer = nano
    samples = [
        encode_prompt(model, tokenizer, sample)
        for task in ("counting", "arithmetic", "sorting", "json")
        for sample in generate_samples(task, 15, 4, "heldout")
    ]
    options = {"max_new_tokens": 160, "do_sample": False}
    settings = {"ar": {"strategy": "ar"} | options, "wedlm": {"strategy": "wedlm"} | options}
    rows = pd.DataFrame(measure(model, tokenizer, samples, settings, batch_size=15)).groupby("decoder")
    right, sums = rows["right"].mean(), rows[["new_tokens", "forwards"]].sum()
    assert right["ar"] >= 0.85
    assert right["wedlm"] >= 0.8
    assert sums["new_tokens"]["wedlm"] / sums["forwards"]["wedlm"] >= 1.8
