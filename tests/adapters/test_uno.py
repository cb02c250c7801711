"""Uno's adapters, PEFT's own files: what their two forwards a cycle draft and check, one forward a step does."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import EOS, PAD, VOCAB_SIZE, randomize, tiny_model, tiny_tokenizer, write_checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from wedlm_hf import add_mask_adapter, load_mask_adapter, save_mask_adapter, unload_mask_adapter
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.adapters.attach import add_root_head
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.adapters.loading import load_adapted
from wedlm_hf.adapters.uno import DEPTH, NoiseRun
from wedlm_hf.checkpoints.packed import can_pack, pack
from wedlm_hf.generation.drafter import AdapterMasks
from wedlm_hf.generation.grammar import Grammar, JSONConstraint

RANK, ALPHA, MASK = 4, 64, 300
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied, grouped": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "biases": {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 4},
}
EXACT = {"strategy": "wedlm", "verification": "exact"}
VERIFIED = EXACT | {"slot_cost": 0.01}
WAYS: dict[str, dict[str, Any]] = {
    "planned": VERIFIED,
    "never drafts": EXACT | {"slot_cost": 1e6},
    "window of one": EXACT | {"window_size": 1},
    "window of four": EXACT | {"window_size": 4},
    "static cache": EXACT | {"window_size": 4, "cache_implementation": "static", "disable_compile": True},
}
PROMPTS = [[5, 6, 7, 8], [9, 4, 77, 12, 30, 8], [41]]


def build(shape: str = "tied") -> Qwen3ForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        **{"vocab_size": VOCAB_SIZE, "head_dim": 8, "num_key_value_heads": 2, "eos_token_id": EOS, "pad_token_id": PAD}
        | sizes
        | SHAPES[shape]
    )
    torch.manual_seed(0)
    return randomize(Qwen3ForCausalLM(config)).eval()


def saved(folder: Path, shape: str = "tied", **settings: Any) -> Path:
    """PEFT's own files of a LoRA that changes much."""
    lora = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | settings
    model = get_peft_model(build(shape), LoraConfig(**lora))
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_(std=0.15)
    model.save_pretrained(folder)
    return folder


class TwoForwards:
    """Uno's cycle from scratch, without a cache: a forward that drafts, with LoRA on noise rows alone, and one that
    checks."""

    def __init__(self, model: Any, folder: Path, run: NoiseRun):
        self.model, self.run, self.gated = model, run, 0
        weights = load_file(folder / "adapter_model.safetensors")
        for name, module in model.named_modules():
            if (key := f"base_model.model.{name}.lora_A.weight") in weights:
                pair = weights[key], weights[key.replace("lora_A", "lora_B")]
                module.register_forward_hook(
                    lambda module, args, output, pair=pair: self.update(args[0], output, *pair)
                )

    def update(self, rows: Any, output: Any, down: Any, up: Any) -> Any:
        if not self.gated:
            return None
        output[:, -self.gated :] += ALPHA / RANK * (rows[:, -self.gated :] @ down.T @ up.T)
        return output

    @torch.no_grad()
    def logits(self, tokens: list[int], gated: int = 0) -> torch.Tensor:
        self.gated = gated
        return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    def draft(self, prompt: list[int], text: list[int], depth: int) -> list[int]:
        """The token that the text's last row chooses, and drafts behind it."""
        noise = [self.run.fill(prompt, text, place) for place in range(depth)]
        return self.logits([*text, *noise], depth)[len(text) - 1 :].argmax(-1).tolist()

    def decode(self, prompt: list[int], count: int, depth: int = 3) -> list[int]:
        text = list(prompt)
        while len(text) < len(prompt) + count and EOS not in text[len(prompt) :]:
            proposed = self.draft(prompt, text, depth)
            chosen = self.logits([*text, *proposed])[len(text) :].argmax(-1).tolist()
            passed = next((n for n, token in enumerate(proposed[1:]) if token != chosen[n]), depth)
            text += [*proposed[: 1 + passed], chosen[passed]]
        new = text[len(prompt) :][:count]
        return new[: new.index(EOS) + 1] if EOS in new else new


def new_tokens(model: Any, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(row) for row in rows], batch_first=True, padding_side="left"
    )
    output = model.generate(ids, attention_mask=mask, max_new_tokens=16, pad_token_id=PAD, **how)
    found = output[:, ids.shape[1] :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in found]


@pytest.mark.parametrize(
    ("shape", "way", "together"),
    [
        ("tied", "planned", True),
        ("untied, grouped", "planned", False),
        ("biases", "window of four", True),
        ("tied", "window of four", False),
        ("untied, grouped", "static cache", True),
        ("biases", "static cache", False),
    ],
)
def test_one_forward_drafts_what_their_two_forwards_draft_and_the_text_is_the_bases(
    shape, way, together, tmp_path, monkeypatch
):
    folder, seen = saved(tmp_path, shape), []
    model, oracle = build(shape), TwoForwards(build(shape), folder, NoiseRun(mask_token_id=MASK))
    expected = [new_tokens(model, [prompt], do_sample=False)[0] for prompt in PROMPTS]
    assert [oracle.decode(prompt, 16) for prompt in PROMPTS] == expected
    load_mask_adapter(model, folder, mask_token_id=MASK)
    add = AdapterMasks.add

    def note(source: Any, tree: Any, sequence: Any, masks: int, guess: Any) -> None:
        prompt = sequence.tokens[: sequence.prompt_length]
        seen.extend((prompt, sequence.tokens[:-1], depth, guess[depth].tokens[0]) for depth in range(masks))
        add(source, tree, sequence, masks, guess)

    monkeypatch.setattr(AdapterMasks, "add", note)
    parts = [PROMPTS] if together else [[prompt] for prompt in PROMPTS]
    found = [row for part in parts for row in new_tokens(model, part, do_sample=False, **WAYS[way])]
    assert found == expected
    deepest = max(depth for _, _, depth, _ in seen)
    assert len(seen) > 40 and deepest > 1
    texts = {tuple(text): (prompt, text) for prompt, text, *_ in seen}
    drafts = {key: oracle.draft(*pair, deepest + 1)[1:] for key, pair in texts.items()}
    assert [drafts[tuple(text)][depth] for _, text, depth, _ in seen] == [token for *_, token in seen]
    plain = {key: int(oracle.logits([*key, 5, 5])[-2].argmax()) for key in texts}  # LoRA and noise matter
    assert sum(plain[tuple(text)] != token for _, text, _, token in seen) > len(seen) / 2


def test_drafts_that_are_right_are_accepted_and_noise_of_each_kind_changes_no_text(tmp_path):
    folder = saved(tmp_path)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: 0 * weight for name, weight in weights.items()}, folder / "adapter_model.safetensors")
    base = build()
    base.lm_head.weight.data[:] = 0  # says nothing of the text: each row chooses the same token
    base.lm_head.weight.data[7] = base.model.norm.weight
    expected = new_tokens(base, PROMPTS[:1], do_sample=False)
    for noise in ("deterministic_uniform", "random_uniform", "mask"):
        load_mask_adapter(base, folder, mask_token_id=MASK, noise=noise)
        state = torch.get_rng_state()
        output = base.generate(
            torch.tensor(PROMPTS[:1]), max_new_tokens=16, do_sample=False, return_dict_in_generate=True, **VERIFIED
        )
        assert torch.get_rng_state().equal(state)
        assert output.sequences[:, 4:].tolist() == expected
        unload_mask_adapter(base)


def test_samples_are_those_of_ar_decoding_and_the_same_call_takes_the_same_forwards(tmp_path):
    model = build()
    load_mask_adapter(model, saved(tmp_path), mask_token_id=MASK)
    for prompts in (PROMPTS[:1], PROMPTS):
        found = []
        for way in WAYS.values():
            torch.manual_seed(3)
            found.append(new_tokens(model, prompts, do_sample=True, temperature=1.2, **way))
        assert found == [found[0]] * len(found)
    ids, forwards = torch.tensor(PROMPTS[:1]), []
    for _ in range(2):
        output = model.generate(ids, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, **VERIFIED)
        forwards.append((output.stats.forwards.tolist(), output.stats.drafted.tolist()))
    assert forwards[0] == forwards[1]


def test_a_lora_of_the_user_beside_it_and_packed_layers_keep_their_own_text(tmp_path):
    folder, lora = saved(tmp_path / "uno"), saved(tmp_path / "lora", target_modules=["q_proj", "down_proj"], r=2)
    expected = new_tokens(PeftModel.from_pretrained(build(), lora).merge_and_unload(), PROMPTS, do_sample=False)
    first = build()
    load_mask_adapter(first, folder, mask_token_id=MASK)
    first = PeftModel.from_pretrained(first, lora)
    second = PeftModel.from_pretrained(build(), lora)
    load_mask_adapter(second.get_base_model(), folder, mask_token_id=MASK)
    for model in (first, second):
        rows = [torch.tensor([prompt]) for prompt in PROMPTS]
        found = [
            model.generate(input_ids=ids, max_new_tokens=16, do_sample=False, **VERIFIED)[0, ids.shape[1] :].tolist()
            for ids in rows
        ]
        assert [row[: len(own)] for row, own in zip(found, expected, strict=True)] == expected
    if can_pack():
        model = pack(build())
        expected = new_tokens(model, PROMPTS[:1], do_sample=False)
        load_mask_adapter(model, folder, mask_token_id=MASK)
        assert new_tokens(model, PROMPTS[:1], do_sample=False, **VERIFIED) == expected


@pytest.mark.parametrize(
    ("way", "has_lora"),
    [("planned", True), ("never drafts", False), ("window of one", False), ("window of four", True),
     ("static cache", True)],
)  # fmt: skip
def test_answers_follow_a_schema_as_ars_do_in_batches_with_a_lora_beside_it(way, has_lora, tmp_path):
    folder, model = saved(tmp_path / "uno"), build()
    if has_lora:
        lora = saved(tmp_path / "lora", target_modules=["q_proj", "down_proj"], r=2)
        model = PeftModel.from_pretrained(model, lora).eval()
    schemas = [{"type": "object"}, {"type": "array", "items": {"type": "integer"}}, {"enum": ["Ada", "Alan"]}, None]
    grammars = [schema and Grammar(tiny_tokenizer(), schema) for schema in schemas]

    def answers(**how: Any) -> list[list[list[int]]]:
        processors = [[JSONConstraint(grammar, [EOS])] if grammar else [] for grammar in grammars]
        return [new_tokens(model, PROMPTS, do_sample=False, logits_processor=each, **how) for each in processors]

    expected = answers()
    load_mask_adapter(model.get_base_model() if has_lora else model, folder, mask_token_id=MASK)
    assert answers(**WAYS[way]) == expected
    assert len(set(map(str, expected))) == len(schemas)


def test_a_folder_of_a_larger_one_is_read_as_peft_wrote_it_and_gives_pefts_updates(tmp_path):
    folder = saved(tmp_path / "uno-qwen3" / "adapter", use_rslora=True).parent
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    model, ids = build(), torch.tensor([[5, 6, 7, 8, 90, 17]])
    peft = PeftModel.from_pretrained(build(), folder / "adapter").eval()
    load_mask_adapter(model, folder, subfolder="adapter", mask_token_id=MASK)
    with torch.no_grad():
        real = model(ids).logits
        with model.predicting(ids.shape[1]):  # LoRA on every row is PEFT's model
            torch.testing.assert_close(model(ids).logits, peft(ids).logits)
        assert not torch.allclose(real, peft(ids).logits, atol=0.1)
    assert real.equal(build()(ids).logits)
    with pytest.raises(OSError, match=r"There is no adapter in '.*': it has no adapter_config\.json"):
        load_mask_adapter(build(), folder, mask_token_id=MASK)


def test_the_mask_token_is_the_callers_the_configs_the_tokenizers_or_said_to_be_unknown(tmp_path):
    folder, model = saved(tmp_path / "adapter"), build()

    def found(**how: Any) -> int:
        load_mask_adapter(model, folder, **how)
        token = model.mask_run.mask_token_id
        unload_mask_adapter(model)
        return token

    model.config.name_or_path = ""
    with pytest.raises(ValueError, match=r"The mask token of the adapter .* is not known: .* Pass `mask_token_id`"):
        found()
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    tokenizer.add_tokens("<|MASK|>")
    tokenizer.save_pretrained(tmp_path / "base")
    build().config.save_pretrained(tmp_path / "base")
    model.config.name_or_path = str(tmp_path / "base")
    assert found() == len(tokenizer) - 1
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(folder)
    assert found() == tokenizer.mask_token_id
    model.config.mask_token_id = 200
    assert found() == 200 and found(mask_token_id=100) == 100
    model.config.mask_token_id, model.config.model_type = None, "k2_horizon"
    for file in folder.glob("tokenizer*"):
        file.unlink()
    model.config.name_or_path = ""
    assert found() == VOCAB_SIZE
    for token in (1, VOCAB_SIZE + 1, 2.5):
        with pytest.raises(ValueError, match=f"`mask_token_id` must be a token of the model, 2 to {VOCAB_SIZE}, got"):
            found(mask_token_id=token)
    with pytest.raises(ValueError, match=f"2 to {VOCAB_SIZE - 1}, got {VOCAB_SIZE}"):
        found(mask_token_id=VOCAB_SIZE, noise="mask")
    with pytest.raises(ValueError, match=r"`noise` must be one of 'deterministic_uniform', .*, got 'white'"):
        found(mask_token_id=9, noise="white")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, r"states rank 8, and [a-z_.]+ has others: .4"),
        ({"r": None}, "must state a rank and a scale, got `r` None"),
        ({"r": "4"}, "must state a rank and a scale, got `r` '4'"),
        ({"lora_alpha": None}, "must state a rank and a scale"),
        ({"use_dora": True}, "is a LoRA with `use_dora` True, and no adapter of Uno"),
        ({"modules_to_save": ["lm_head"]}, "is a LoRA with `modules_to_save`"),
        ({"target_modules": [*TARGETS, "w4"]}, "lacks 1 matrices, w4 among them"),
        ({"peft_type": "IA3"}, "is no mask adapter: its `peft_type` is 'IA3'"),
    ],
)
def test_a_config_that_is_not_unos_is_refused(changes, message, tmp_path):
    file = saved(tmp_path) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        load_mask_adapter(build(), tmp_path, mask_token_id=MASK)


def test_weights_that_are_missing_damaged_pickled_or_another_bases_are_refused(tmp_path):
    folder = saved(tmp_path / "whole")

    def refused(message: str, error: Any = ValueError, model: Any = None, **changed: Any) -> None:
        copy, model = shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True), model or build()
        weights = load_file(folder / "adapter_model.safetensors") | changed
        save_file(
            {key: value for key, value in weights.items() if value is not None}, copy / "adapter_model.safetensors"
        )
        with pytest.raises(error, match=message):
            load_mask_adapter(model, copy, mask_token_id=MASK)
        assert not hasattr(model, "mask_adapter")

    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    refused(r"lacks 1 matrices, layers\.1\.mlp\.up_proj\.lora_B among them", **{name: None})
    refused("holds NaN or infinite numbers: mlp.up_proj.lora_B", **{name: torch.full((48, 4), torch.nan)})
    refused(
        "lm_head.lora_A.weight': Uno's are LoRA on", **{"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)}
    )
    other = Qwen3ForCausalLM(Qwen3Config(**build().config.to_dict() | {"intermediate_size": 64})).eval()
    refused(
        r"belongs to another base than this model: mlp\.down_proj of layer 0 is 32 x 48, here 32 x 64", model=other
    )
    small = Qwen3ForCausalLM(Qwen3Config(**build().config.to_dict() | {"num_hidden_layers": 1, "layer_types": None}))
    refused("belongs to another base than this model, which has 1 layers: it updates layer 1", model=small.eval())
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(OSError, match="damaged or truncated"):
        load_mask_adapter(build(), folder, mask_token_id=MASK)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(
        OSError, match=r"has no adapter_model\.safetensors; \.bin files are not read, since they may run"
    ):
        load_mask_adapter(build(), folder, mask_token_id=MASK)


def test_it_is_read_as_it_is_and_no_more(tmp_path):
    model = build()
    load_mask_adapter(model, saved(tmp_path), mask_token_id=MASK)
    assert model.deepest == DEPTH
    for act in (
        lambda: save_mask_adapter(model, tmp_path / "again"),
        lambda: add_root_head(model, 8),
        lambda: MaskDistillation(model),
    ):
        with pytest.raises(
            ValueError, match="An adapter of Uno is read as it is: it is not trained here, extended or"
        ):
            act()
    unload_mask_adapter(model)
    with pytest.raises(ValueError, match="An adapter of Uno is read as it is"):
        load_mask_adapter(model, tmp_path, mask_token_id=MASK, is_trainable=True)
    assert not hasattr(model, "mask_adapter")


def test_commands_take_it_by_a_name_of_its_own(tmp_path):
    model = build()
    model.config.mask_token_id = MASK
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    expected = new_tokens(build(), PROMPTS[:1], do_sample=False)
    saved(tmp_path / "base" / "adapter")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(OSError, match=r"There is no adapter in '.*nothing': it has no adapter_config\.json"):
        load_adapted(tmp_path / "base", f"uno:{tmp_path / 'nothing'}")
    for name in ("base", "base/adapter"):  # a bundle has the adapter in a folder of its own
        found, _ = load_adapted(tmp_path / "base", f"uno:{tmp_path / name}")
        assert found.generation_config.verification == "exact"
        assert new_tokens(found, PROMPTS[:1], do_sample=False, **VERIFIED) == expected


def test_its_settings_are_refused_for_an_adapter_of_ours_and_a_merged_one_is_warned_of(tmp_path, caplog):
    model = build()
    add_mask_adapter(model, MaskAdapterSettings(rank=2, head_width=0))
    save_mask_adapter(model, tmp_path / "ours")
    for how in ({"mask_token_id": 5}, {"noise": "mask"}):
        with pytest.raises(ValueError, match="`mask_token_id` and `noise` are for adapters of Uno; this one"):
            load_mask_adapter(build(), tmp_path / "ours", **how)
    base = tmp_path / "base"
    write_checkpoint(base, tiny_model())
    lora = get_peft_model(
        tiny_model(), LoraConfig(r=2, lora_alpha=40, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    lora.save_pretrained(tmp_path / "lora")
    load_adapted(base, tmp_path / "lora")
    assert "has an unusual scale, 20, and is merged into the weights. If it is one of Uno" in caplog.text
    with pytest.raises(ValueError, match="`any_base` is about the base of a mask adapter, and there is none"):
        load_adapted(base, tmp_path / "lora", any_base=True)
    tuned = tmp_path / "tuned"
    other = build()
    other.model.norm.weight.data += 1
    other.save_pretrained(tuned)
    tiny_tokenizer().save_pretrained(tuned)
    with pytest.raises(
        ValueError, match=r"fine-tune of that one, keep the adapter: pass `any_base=True` to .*`--any-base`"
    ):
        load_adapted(tuned, tmp_path / "ours")
    found, _ = load_adapted(tuned, tmp_path / "ours", any_base=True)
    assert new_tokens(found, PROMPTS[:1], do_sample=False, **VERIFIED) == new_tokens(
        other, PROMPTS[:1], do_sample=False
    )
