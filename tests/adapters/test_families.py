"""Mask adapters on tiny random models of every family: verified decoding is plain `generate`.

python tests/adapters/test_families.py        writes the tables of docs/models.md
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_mask_adapter import SMALL, with_adapter
from torch import nn
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from wedlm_hf import add_mask_adapter, load_mask_adapter, save_mask_adapter
from wedlm_hf.adapters import MaskAdapterSettings
from wedlm_hf.adapters.distillation import MaskDistillation
from wedlm_hf.checkpoints.packed import pack
from wedlm_hf.generation.versions import CACHE, cache_of
from wedlm_hf.modeling_wedlm.convert import FAMILIES as CONVERTIBLE

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 16}  # shorter than the longest prompts, and crossed behind those of 12 tokens and more
HEADS = {"head_dim": 8}
GEMMA = HEADS | WINDOW | {"query_pre_attn_scalar": 8}
EXPERTS = HEADS | {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "head_dim": 8}
DEEPSEEK = LATENT | EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
EACH = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2}
EACH |= {"layer_types": ["sliding_attention", "full_attention"] * 2}

UNTRAINED = "decodes only"


def alike(names: str, own: dict[str, Any], said: str = "") -> dict[str, tuple[dict[str, Any], str]]:
    """Families whose configs have the same beside the sizes, and what is said of them: layers, or why not."""
    return dict.fromkeys(names.split(), (own, said))


SLIDING, SLIDING_AND_FULL = "sliding attention", "sliding and full attention"
# By the name in transformers.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    **alike("Apertus Arcee BitNet Cohere HyperCLOVAX Jais2 Llama NanoChat Nemotron Olmo Olmo2 Persimmon", {}),
    **alike("Granite Qwen2 SmolLM3", {}),
    **alike("Ernie4_5 Gemma Glm Glm4 Helium HunYuanDenseV1 Qwen3 SeedOss", HEADS),
    **alike("Afmoe FlexOlmo Glm4Moe GraniteMoe GraniteMoeShared HunYuanMoEV1 MiniMaxM2 Mixtral", EXPERTS, "experts"),
    **alike("Olmoe Phimoe Qwen3Moe", EXPERTS, "experts"),
    **alike("Dots1", DEEPSEEK | {"n_shared_experts": 1, "num_key_value_heads": 2}, "experts"),
    **alike("Ernie4_5_Moe", EXPERTS | {"moe_num_experts": 4, "moe_k": 2}, "experts"),
    **alike("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 24}, "experts"),
    **alike("JetMoe", {"kv_channels": 8, "num_key_value_heads": 2}, "experts; " + UNTRAINED),
    **alike("DeepseekV2 DeepseekV3", DEEPSEEK, "experts; latent attention; " + UNTRAINED),
    **alike("MiniCPM3", LATENT, "latent attention; " + UNTRAINED),
    **alike("Llama4", {"attention_chunk_size": 16} | EXPERTS, "experts; chunked and full attention"),
    **alike("ExaoneMoe", EXPERTS | WINDOW | {"n_group": 1, "topk_group": 1}, "experts; " + SLIDING_AND_FULL),
    **alike("GptOss", EXPERTS | WINDOW, f"experts; {SLIDING_AND_FULL}, eager"),
    **alike("Mistral Phi3 Starcoder2", WINDOW, SLIDING),
    **alike("Ministral Ministral3", HEADS | WINDOW, SLIDING),
    **alike("Cohere2 Cwm Olmo3", WINDOW, SLIDING_AND_FULL),
    **alike("Exaone4", WINDOW | {"sliding_window_pattern": 4}, SLIDING_AND_FULL),
    **alike("Gemma3", GEMMA, SLIDING_AND_FULL),
    **alike("Gemma2 VaultGemma", GEMMA, SLIDING_AND_FULL + ", eager"),
    **alike("Gemma3n", GEMMA | EACH, f"{SLIDING_AND_FULL}; {UNTRAINED}"),
    **alike("Gemma4", GEMMA | EACH | {"global_head_dim": 16}, f"{SLIDING_AND_FULL}; {UNTRAINED}"),
    **alike("ModernBertDecoder", {"local_attention": 16}, f"{SLIDING_AND_FULL}; {UNTRAINED}"),
    **alike("Falcon", {"alibi": False}, "rotary models; attention of its own; " + UNTRAINED),
    **alike("DiffLlama", {}, UNTRAINED),
    **alike("StableLm", {}, "attention of its own"),
    **alike("GPTNeoX Phi", {}, "parallel attention and MLP"),
}
GPTJ = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_inner": 48, "n_positions": 512, "rotary_dim": 4}
REFUSED = {
    **alike("CodeGen GPTJ", GPTJ, "its rotary embeddings are a table"),
    **alike("Bloom GPT2 Mpt OPT", {}, "no rotary position embeddings"),
    "Falcon": ({"alibi": True}, "positions are ALiBi's"),
    "DeepseekV32": ({}, "its layers choose what a row sees in a way of their own"),
    "Moshi": ({}, "its prompts see further back than the sliding window of its cache"),
    "Doge": ({}, "a forward with masks fails"),
}
PROCESSORS = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5}
WHAT = ("greedy", "sampled", "batch of 3", "processors", "window crossed", "two turns")


def build(name: str, own: dict[str, Any]) -> Any:
    """A tiny random model, in evaluation mode."""
    made = [getattr(transformers, name + ending, None) for ending in ("ForCausalLM", "LMHeadModel")]
    model_class: Any = next(found for found in made if found)
    config = model_class.config_class(**SIZES | own)
    if isinstance(config.get_text_config(decoder=True), type(config)) is False:
        config = config.get_text_config(decoder=True)
    torch.manual_seed(0)
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.25)
    return model


def prompt(length: int) -> torch.Tensor:
    return torch.randint(6, 97, (1, length), generator=torch.Generator().manual_seed(length))


def equal_parts(model: Any) -> Iterator[str]:
    """Which of `WHAT` verified decoding does exactly as plain `generate`."""
    length: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": 96}
    greedy = length | {"do_sample": False}
    exact: dict[str, Any] = {"strategy": "wedlm", "verification": "exact"}
    drafting = exact | {"window_size": 3}

    lengths = (4, 12, 22)
    plain = {size: model.generate(prompt(size), **greedy) for size in lengths}
    if torch.equal(model.generate(prompt(12), **greedy, **drafting), plain[12]):
        yield "greedy"
    # A seed gives the same sample, whatever was drafted.
    samples = []
    for how in (drafting, exact | {"slot_cost": 1e9}):
        torch.manual_seed(7)
        samples.append(model.generate(prompt(12), do_sample=True, top_k=0, **length, **how))
    if torch.equal(*samples):
        yield "sampled"
    ids, mask = torch.zeros(3, 22, dtype=torch.long), torch.zeros(3, 22, dtype=torch.long)
    for row, size in enumerate(lengths):
        ids[row, -size:], mask[row, -size:] = prompt(size), 1
    batch = model.generate(ids, attention_mask=mask, **greedy, **drafting)
    alone = [plain[size][0, size:] for size in lengths]
    if all(torch.equal(row[22 : 22 + len(own)], own) for row, own in zip(batch, alone, strict=True)):
        yield "batch of 3"
    processed = [model.generate(prompt(6), **greedy, **PROCESSORS, **how) for how in (drafting, {})]
    if torch.equal(*processed):
        yield "processors"
    if torch.equal(model.generate(prompt(22), **greedy, **drafting), plain[22]):
        yield "window crossed"
    first = model.generate(prompt(12), **greedy, **drafting, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, prompt(4)], dim=1)
    whole = {"attention_mask": torch.ones_like(longer)} | greedy
    second = model.generate(longer, **{CACHE: cache_of(first)}, **whole, **drafting)
    if torch.equal(second, model.generate(longer, **whole)):
        yield "two turns"


RUNS = ["adapter", "batches", "packed layers", "static cache", "GGUF", "WeDLM training", "vLLM"]
ON_VLLM = {"llama", "qwen2", "qwen3"}  # STYLES of tests/serving/vllm/test_start_up.py, which need vLLM
VERSION = f"transformers {transformers.__version__}"


def what_runs(name: str) -> list[str]:
    """A cell for each of `RUNS`, seen on a tiny model; of GGUF, whether transformers has a map of its tensors."""
    greedy: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": 96, "do_sample": False}
    drafting = {"strategy": "wedlm", "verification": "exact", "window_size": 3}
    seen = [
        "decodes, no training" if UNTRAINED in FAMILIES[name][1] else "trains, decodes",
        "yes",
    ]  # see `equal_parts`
    fixed = {"cache_implementation": "static", "disable_compile": True}
    for make, how in ((pack, {}), (lambda model: model, fixed)):
        try:
            model = make(with_adapter(build(name, FAMILIES[name][0])))
            own, plain = (model.generate(prompt(5), **greedy, **how, **each) for each in (drafting, {}))
            seen.append("yes" if torch.equal(own, plain) else "other text")
        except ValueError:
            seen.append("refused")
    kind = model.config.get_text_config(decoder=True).model_type
    kinds = {kind, model.config.model_type, kind.removesuffix("_text")}
    return [*seen, *("yes" if kinds & {*some} else "–" for some in (GGUF_CONFIG_MAPPING, CONVERTIBLE, ON_VLLM))]


RARE = set(
    "Afmoe Apertus Arcee Cwm DeepseekV2 Dots1 Ernie4_5 Ernie4_5_Moe ExaoneMoe FlexOlmo Glm Glm4Moe GraniteMoe "
    "GraniteMoeShared Helium HunYuanDenseV1 HunYuanMoEV1 HyperCLOVAX Jais2 JetMoe MiniCPM3 MiniMaxM2 Ministral "
    "ModernBertDecoder NanoChat Nemotron Olmo Olmoe Persimmon Phimoe Qwen2Moe SeedOss SmolLM3".split()
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in RARE else n for n in FAMILIES])
def test_verified_decoding_is_plain_generate(name, tmp_path):
    model = with_adapter(build(name, FAMILIES[name][0]), replace(SMALL, root_width=8))
    assert tuple(equal_parts(model)) == WHAT
    save_mask_adapter(model, tmp_path)
    load_mask_adapter(build(name, FAMILIES[name][0]).bfloat16(), tmp_path)
    with pytest.raises(ValueError, match="cannot train") if UNTRAINED in FAMILIES[name][1] else nullcontext():
        MaskDistillation(model)
    shown = [cells_of(line) for line in PAGE.read_text(encoding="utf-8").splitlines()]
    (own_cells,) = (cells for names, *cells in shown if f"`{name}`" in names and len(cells) == 2)
    assert own_cells == cells_beside(name, model), f"python {Path(__file__).name} writes {PAGE.name}"
    if VERSION in PAGE.read_text(encoding="utf-8"):  # others may run more, or less
        (own_cells,) = (cells for names, *cells in shown if f"`{name}`" in names and len(cells) == len(RUNS))
        assert own_cells == what_runs(name), f"python {Path(__file__).name} writes {PAGE.name}"


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_carry_a_mask_adapter_is_refused_with_the_reason(name):
    own, reason = REFUSED[name]
    model = build(name, own)
    with pytest.raises(ValueError, match=f"{type(model).__name__} cannot carry a mask adapter: .*{reason}"):
        add_mask_adapter(model, MaskAdapterSettings(rank=4))
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")


def test_an_encoder_decoder_is_refused():
    config = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50)
    with pytest.raises(ValueError, match="it is an encoder-decoder"):
        add_mask_adapter(transformers.T5ForConditionalGeneration(config))


ROPE = {"rope_theta": 1e4, "factor": 4.0}
LONG = ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}
TURNS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("Phi3", {"original_max_position_embeddings": 40, "rope_parameters": LONG}),
    "dynamic": ("Llama", {"max_position_embeddings": 40, "rope_parameters": ROPE | {"rope_type": "dynamic"}}),
    "attn_temperature_tuning": ("Llama4", {"floor_scale": 80, "no_rope_layers": [1, 0, 0, 0]} | EXPERTS),
}


@pytest.mark.parametrize("kind", TURNS)
def test_what_changes_for_all_rows_at_a_length_is_not_crossed(kind):
    name, own = TURNS[kind]
    model = with_adapter(build(name, own))
    exact: dict[str, Any] = {"strategy": "wedlm", "verification": "exact", "window_size": 6}

    def check(ids: torch.Tensor, cache: Any = None, **limit: int) -> Any:
        greedy: dict[str, Any] = {"do_sample": False, "eos_token_id": 96, **limit}
        found = model.generate(ids, **greedy, **exact, return_dict_in_generate=True, **{CACHE: cache} if cache else {})
        assert torch.equal(found.sequences, model.generate(ids, **greedy))
        return found

    check(prompt(20), max_length=40)
    with pytest.raises(ValueError, match=f"{kind}.* 40"):
        check(prompt(20), max_length=41)
    if kind == "longrope":  # all of the call lies behind that point
        first = check(prompt(41), max_new_tokens=12)
        check(first.sequences, cache_of(first), max_new_tokens=12)


def test_a_model_that_takes_images_writes_text_behind_text_alone(tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    images = {"vision_config": vision | {"image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}
    config = transformers.Gemma3Config(text_config=SIZES | GEMMA, image_token_index=95, **images)
    torch.manual_seed(0)
    model = with_adapter(transformers.Gemma3ForConditionalGeneration(config).eval())
    assert tuple(equal_parts(model)) == WHAT
    save_mask_adapter(model, tmp_path)
    load_mask_adapter(transformers.Gemma3ForConditionalGeneration(config), tmp_path, any_base=True)
    MaskDistillation(model)
    with pytest.raises(ValueError, match="no use for the inputs"):
        model.generate(prompt(5), pixel_values=torch.zeros(1, 3, 28, 28), strategy="wedlm", verification="exact")


def test_layers_without_a_cache_of_their_own_decode_in_fixed_shapes():
    model = with_adapter(build("Gemma4", FAMILIES["Gemma4"][0]))
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    exact = {"strategy": "wedlm", "verification": "exact", "disable_compile": True}
    assert torch.equal(model.generate(prompt(5), **greedy, **exact), model.generate(prompt(5), **greedy))


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def cells_beside(name: str, model: Any) -> list[str]:
    """What the table says of a family: its layers, and what the adapter updates."""
    targets = model.mask_adapter.settings.target_modules
    return [FAMILIES[name][1], ", ".join(f"`{target}`" for target in targets)]


def table(head: list[str], rows: list[tuple[str, list[str]]]) -> list[str]:
    """One line for all names of which the same is said."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows:
        alike.setdefault(tuple(cells), []).append(f"`{name}`")
    lines = [f"| {' | '.join([', '.join(names), *cells])} |" for cells, names in alike.items()]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines]


def main() -> None:
    """Writes all tables."""
    rows = []
    for name, (own, _) in sorted(FAMILIES.items()):
        model = with_adapter(build(name, own))
        assert tuple(equal_parts(model)) == WHAT, name
        rows.append((name, cells_beside(name, model)))
    refused = [(name, [reason]) for name, (_, reason) in REFUSED.items()]
    write(
        "families",
        [*table(["families", "layers", "updated by the adapter"], rows), "", *table(["refused", "why"], refused)],
    )
    runs = [(name, what_runs(name)) for name in sorted(FAMILIES)]
    write("runs", [f"Seen with {VERSION}.", "", *table(["families", *RUNS], runs)])


def write(part: str, lines: list[str]) -> None:
    """Writes a part of the page."""
    begin, end = f"<!-- {part}: begin -->\n", f"<!-- {part}: end -->"
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    PAGE.write_text(head + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
