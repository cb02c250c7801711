"""`examples/paper-findings/trends.py`: what it says of made-up sweeps."""

import random

import pandas as pd
import pytest
from tiny import script

from wedlm_hf.eval.decoders import candidates

example = script("examples/paper-findings/trends.py")
HOLDS, LARGELY, OPEN, FAILS, MISSING = (
    getattr(example, name) for name in ("HOLDS", "LARGELY", "OPEN", "FAILS", "MISSING")
)
ACCURATE, SLOWER, SLOWER_CLOCK, STREAMING, STREAMING_CLOCK, CACHEABLE, TEXT, TEXT_CLOCK = range(8)
PROMPTS = 200
GRID = candidates(windows=(4,), thresholds=(0.1, 0.2, 0.4), penalties=(0.0, 0.1), decoders=("block", "wedlm"))


def rows(decoder, make, prompts=PROMPTS):
    """`make(index)`: right, tokens, forwards, instances, seconds of a prompt."""
    table = []
    for index in range(prompts):
        right, tokens, forwards, instances, seconds = make(index)
        row = {"decoder": decoder, "prompt": index, "batch_size": 1, "new_tokens": tokens, "forwards": forwards}
        row |= {"token_instances": instances, "seconds": seconds, "forward_seconds": seconds}
        table += [row | {"kind": "quality", "quality": right, "entropy": 0.01 + index / prompts}]
        table += [row | {"kind": "speed"}]
    return table


def constant(right=1.0, tokens=20, forwards=20, instances=19, seconds=1.0):
    return lambda index: (right, tokens, forwards, instances, seconds)


def swept(make, prompts=PROMPTS, grid=GRID):
    """A sweep; `make(strategy, tau, lam)` gives a decoder."""
    table = rows("ar", constant(), prompts)
    for name, options in grid.items():
        if name != "ar":
            setting = (options[key] for key in ("strategy", "entropy_threshold", "distance_penalty"))
            table += rows(name, make(*setting), prompts)
    return pd.DataFrame(table)


def verdicts(make, **options):
    sweep = swept(make, **options)
    return list(example.trends(sweep, sweep)["here"])


def paper_like(strategy, tau, lam, *, sign=1):
    """Everything as the paper has it, or with `sign` −1 everything the other way round."""
    level = sign * (0.3 * tau)
    speed = (1 + 5 * tau) ** sign * (1 if strategy == "wedlm" else 1.3 ** (-sign))

    def decoder(index):
        right = float((index * 37 % PROMPTS) / PROMPTS < 0.6 - level)
        forwards = round(40 / speed)
        return right, 40, forwards, 40 * (2 - sign * 8 * lam) + index % 3, forwards / 20

    return decoder


def test_what_is_as_the_paper_reports_holds_and_its_mirror_image_does_not():
    found = verdicts(paper_like)
    assert found[ACCURATE] in (HOLDS, LARGELY)
    assert found[SLOWER:TEXT] == [HOLDS] * 5
    turned = verdicts(lambda *setting: paper_like(*setting, sign=-1))
    assert turned[:TEXT] == [FAILS] * 6


def test_differences_of_noise_alone_are_decided_about_as_rarely_as_promised():
    decided = 0
    for seed in range(6):

        def make(strategy, tau, lam, seed=seed):
            rng = random.Random(f"{strategy}{tau}{lam}{seed}")
            return lambda index: (float(rng.random() < 0.5), 20, rng.randint(5, 15), 40, rng.random() + 0.5)

        decided += sum(verdict != OPEN for verdict in verdicts(make)[:CACHEABLE])
    assert decided <= 5  # 5 % of 30 are 1.5


def test_few_prompts_decide_nothing_and_missing_settings_are_named():
    assert set(verdicts(paper_like, prompts=4)[:TEXT]) == {OPEN}
    grid = candidates(windows=(4,), thresholds=(0.1,), penalties=(0.1,), decoders=("wedlm",))
    sweep = swept(lambda *setting: constant(), grid=grid)
    checks = example.trends(sweep, sweep)
    assert list(checks["here"][:TEXT]) == [MISSING] * 6
    assert "no two settings that show it" in checks["numbers"][0]


@pytest.mark.parametrize(("slow", "verdict"), [(18, HOLDS), (9, OPEN), (6, FAILS)])
def test_low_entropy_text_is_compared_with_high_entropy_text(slow, verdict):
    def decoder(index):
        forwards = (4.5 if index < PROMPTS // 2 else slow) + (index * 31 % 7 - 3) / 10
        return 1.0, 36, forwards, 60, forwards / 36

    table = pd.DataFrame(rows("ar", constant(tokens=36, forwards=36)) + rows("wedlm", decoder))
    checks = example.check_entropy(table, "wedlm")
    assert [check["here"] for check in checks] == [verdict] * 2
    assert f"{slow / 4.5:.1f}" in checks[0]["numbers"] or verdict == OPEN
