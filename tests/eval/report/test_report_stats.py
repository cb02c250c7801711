"""Errors, curves, areas and checks of the report, against sums by hand and made-up measurements."""

import math
import random

import pytest
import torch

from wedlm_hf.eval.report_measure import Measured
from wedlm_hf.eval.report_stats import (
    FAILS,
    HOLDS,
    LARGELY,
    MISSING,
    MIXED,
    OPEN,
    EntropyEffect,
    Sample,
    area_under,
    areas,
    spearman,
    staircase,
    student_quantile,
    sweep_rows,
    trends,
)
from wedlm_hf.eval.sweep import Grid, choose, largest_loss

PROMPTS = 200


def measured(decoders, *, prompts=PROMPTS, entropies=None):
    """Decoders by name, each a function of the prompt's index: right, tokens, forwards, instances, seconds."""
    table = {name: [make(index) for index in range(prompts)] for name, make in decoders.items()}
    return Measured(
        tasks=["even" if index % 2 == 0 else "odd" for index in range(prompts)],
        timed=range(prompts),
        counts={
            name: torch.tensor([[right, 1, *counts] for right, *counts, _ in rows], dtype=torch.float64)
            for name, rows in table.items()
        },
        times={
            name: torch.tensor([[tokens, seconds] for _, tokens, _, _, seconds in rows], dtype=torch.float64)
            for name, rows in table.items()
        },
        entropies=torch.linspace(0.01, 1, prompts, dtype=torch.float64) if entropies is None else entropies,
    )


def constant(right=1.0, tokens=20, forwards=20, instances=19, seconds=1.0):
    return lambda index: (right, tokens, forwards, instances, seconds)


# --- rows ---------------------------------------------------------------------------------------------------------


def test_ratios_follow_from_sums_and_errors_from_the_spread_over_prompts():
    rng = random.Random(0)
    right = [rng.random() < 0.7 for _ in range(PROMPTS)]
    forwards = [rng.randint(5, 15) for _ in range(PROMPTS)]
    sample = Sample(
        measured({"AR": constant(), "fast": lambda i: (float(right[i]), 20, forwards[i], 40, forwards[i] / 30)})
    )
    row = sample.row("fast")
    share = sum(right) / PROMPTS
    assert row["quality"] == pytest.approx(share)
    assert row["quality_error"] == pytest.approx(math.sqrt(share * (1 - share) / (PROMPTS - 1)), rel=0.1)
    assert row["tokens_per_forward"] == pytest.approx(20 * PROMPTS / sum(forwards), rel=1e-5)
    assert row["prefix_cacheability"] == pytest.approx(0.5)
    assert row["tokens_per_second"] == pytest.approx(20 * PROMPTS / (sum(forwards) / 30), rel=1e-5)
    assert row["speed"] == pytest.approx(PROMPTS / (sum(forwards) / 30), rel=1e-5)
    mean = sum(forwards) / PROMPTS
    spread = math.sqrt(sum((f - mean) ** 2 for f in forwards) / (PROMPTS - 1))
    assert row["speed_error"] / row["speed"] == pytest.approx(spread / mean / math.sqrt(PROMPTS), rel=0.15)
    odd = row["tasks"]["odd"]
    assert odd["prompts"] == PROMPTS / 2
    assert odd["quality"] == pytest.approx(sum(right[1::2]) / (PROMPTS / 2))
    assert odd["tokens_per_forward"] == pytest.approx(20 * (PROMPTS / 2) / sum(forwards[1::2]), rel=1e-5)


def test_too_few_prompts_give_no_error():
    row = Sample(measured({"AR": constant()}, prompts=4)).row("AR")
    assert row["quality_error"] is None and row["quality"] == 1


def test_a_task_without_timed_prompts_has_no_speed():
    data = measured({"AR": constant()}, prompts=10)
    data = Measured(data.tasks, [0, 2], data.counts, {"AR": data.times["AR"][[0, 2]]}, data.entropies)
    row = Sample(data).row("AR")
    assert row["tasks"]["odd"]["speed"] is None and row["tasks"]["even"]["speed"] == 1


# --- front, area, choice ------------------------------------------------------------------------------------------

GRID = Grid(windows=(4,), thresholds=(0.1, 0.2, 0.4), penalties=(0.0, 0.1), decoders=("block", "wedlm"))


def swept(make, *, block_penalty=0.1, **options):
    """A sweep over GRID; `make(strategy, tau, lam)` gives a decoder."""
    candidates = GRID.candidates()
    decoders = {"AR": constant()}
    for name, keywords in candidates.items():
        if name != "AR":
            decoders[name] = make(keywords["strategy"], keywords["entropy_threshold"], keywords["distance_penalty"])
    sample = Sample(measured(decoders, **options))
    return sample, sweep_rows(sample, candidates)


def test_the_front_is_what_brute_force_finds():
    rng = random.Random(1)
    shares = {}

    def make(*setting):
        share, seconds = shares.setdefault(setting, (rng.randint(0, 10) / 10, rng.randint(1, 9) / 10))
        return constant(right=share, seconds=seconds)

    _, rows = swept(make)
    for row in rows:
        beaten = any(
            (other["quality"] > row["quality"] and other["speed"] >= row["speed"])
            or (other["quality"] >= row["quality"] and other["speed"] > row["speed"])
            for other in rows
        )
        assert row["on_front"] != beaten


def test_the_staircase_is_the_best_value_at_x_or_beyond_and_the_area_its_integral():
    rng = random.Random(2)
    for _ in range(50):
        points = [(rng.randint(1, 40) / 4, rng.randint(0, 5) / 5) for _ in range(rng.randint(0, 6))]
        least = rng.choice((0.0, 0.4))
        corners = staircase(points, least)
        centers = [(index + 0.5) / 8 for index in range(100)]  # all corners lie on multiples of 1/4
        best = [max((y for x, y in points if x >= center and y >= least), default=0) for center in centers]
        assert area_under(corners) == pytest.approx(sum(best) / 8)
        assert corners == sorted(corners)


def test_the_area_of_a_decoder_that_loses_nothing_is_its_tokens_per_forward():
    def make(strategy, tau, lam):
        if strategy == "block":  # five times as fast, but wrong: no better than AR
            return constant(right=0.0, forwards=4)
        return constant(right=1.0 if tau < 0.4 else 0.97, forwards=10 if tau < 0.4 else 5)

    sample, rows = swept(make)
    found = {entry["decoder"]: entry for entry in areas(sample, rows)}
    assert found["AR"]["area"] == found["block"]["area"] == 1
    assert found["wedlm"]["area"] == pytest.approx(2 + 2 * 0.97)
    assert found["wedlm"]["curve"] == [[2, 1], [4, 0.97]]


def test_the_area_is_undefined_where_ar_has_no_right_answer():
    candidates = Grid(windows=(4,), thresholds=(0.1,), penalties=(0.0,), decoders=("wedlm",)).candidates()
    sample = Sample(measured(dict.fromkeys(candidates, constant(right=0.0))))
    rows = sweep_rows(sample, candidates)
    assert [entry["area"] for entry in areas(sample, rows)] == [None, None]


def test_the_fastest_setting_within_the_allowed_loss_on_every_task_is_chosen():
    def row(name, counting, chat, speed, decoder="wedlm"):
        tasks = {"counting": {"quality": counting}, "chat": {"quality": chat}}
        return {"name": name, "decoder": decoder, "tokens_per_forward": speed, "tasks": tasks}

    reference = row("AR", 0.96, 0.90, 1, "AR")
    slow, fast, fastest = row("slow", 0.96, 0.90, 2), row("fast", 0.95, 0.89, 3), row("fastest", 1.0, 0.88, 5)
    other = row("block", 1.0, 1.0, 9, "block")
    everything = [reference, slow, fast, fastest, other]
    assert largest_loss(fastest, reference) == pytest.approx(2)
    assert choose(everything, reference, max_loss=1) == fast
    assert choose(everything, reference, max_loss=0) == slow
    assert choose(everything, reference, max_loss=2) == fastest
    assert choose([reference, fastest, other], reference, max_loss=1) is None
    gains = row("gains", 1.0, 1.0, 1.2)
    assert choose([reference, gains], reference, max_loss=0) == gains


# --- checks of the paper's trends ---------------------------------------------------------------------------------

ACCURATE, SLOWER, SLOWER_CLOCK, STREAMING, STREAMING_CLOCK, CACHEABLE, TEXT, TEXT_CLOCK = range(8)


def paper_like(strategy, tau, lam, *, sign=1, quality=1.0, noise=0):
    """Everything as the paper has it, or with `sign` −1 everything the other way round."""
    level = sign * (0.3 * quality * tau)
    speed = (1 + 5 * tau) ** sign * (1 if strategy == "wedlm" else 1.3 ** (-sign))
    rng = random.Random(f"{strategy}{tau}{lam}")

    def decoder(index):
        right = float((index * 37 % PROMPTS) / PROMPTS < 0.6 - level)
        forwards = round(40 / speed) + rng.randint(-noise, noise)
        return right, 40, forwards, 40 * (2 - sign * 8 * lam) + index % 3, forwards / 20

    return decoder


def verdicts(make, **options):
    sample, rows = swept(make, **options)
    text = EntropyEffect(sample, "wedlm", rows[-1]["name"])
    return [check.verdict for check in trends(sample, rows, [text])]


def test_what_is_as_the_paper_reports_holds_and_its_mirror_image_does_not():
    found = verdicts(paper_like)
    assert found[ACCURATE] in (HOLDS, LARGELY)
    assert found[SLOWER:TEXT] == [HOLDS] * 5
    turned = verdicts(lambda *setting: paper_like(*setting, sign=-1))
    assert turned[:TEXT] == [FAILS] * 6


def test_differences_of_noise_alone_are_decided_about_as_rarely_as_promised():
    decided = 0
    for seed in range(12):

        def make(strategy, tau, lam, seed=seed):
            rng = random.Random(f"{strategy}{tau}{lam}{seed}")
            return lambda index: (float(rng.random() < 0.5), 20, rng.randint(5, 15), 40, rng.random() + 0.5)

        decided += sum(verdict != OPEN for verdict in verdicts(make)[:CACHEABLE])
    assert decided <= 8  # 5 % of 60 are 3


def test_one_comparison_against_a_claim_makes_it_mixed():
    def make(strategy, tau, lam):
        if strategy == "block" and tau == 0.2:  # a little faster than streaming, which takes 20 forwards here
            return constant(tokens=40, forwards=19, instances=80, seconds=0.95)
        return paper_like(strategy, tau, lam)

    found = verdicts(make)
    assert found[STREAMING] == found[STREAMING_CLOCK] == MIXED


def test_no_difference_at_all_is_said():
    sample, rows = swept(lambda *setting: constant())
    check = trends(sample, rows, [EntropyEffect(sample, "AR", "AR")])[STREAMING]
    assert check.verdict == FAILS
    assert "3 with no difference at all" in check.evidence
    assert [comparison["sign"] for comparison in check.comparisons] == [None] * 3


def test_few_prompts_decide_nothing_and_missing_settings_are_named():
    assert set(verdicts(paper_like, prompts=4)[:TEXT]) == {OPEN}
    candidates = Grid(windows=(4,), thresholds=(0.1,), penalties=(0.1,), decoders=("wedlm",)).candidates()
    sample = Sample(measured(dict.fromkeys(candidates, constant())))
    checks = trends(sample, sweep_rows(sample, candidates), [EntropyEffect(sample, "AR", "AR")])
    assert [check.verdict for check in checks[:TEXT]] == [MISSING] * 6
    assert "no two settings that show it" in checks[0].evidence


@pytest.mark.parametrize(("slow", "verdict"), [(18, HOLDS), (9, OPEN), (6, FAILS)])
def test_low_entropy_text_is_compared_with_high_entropy_text(slow, verdict):
    def decoder(index):
        forwards = 4.5 + (index * 31 % 7 - 3) / 10 if index < PROMPTS // 2 else slow + (index * 31 % 7 - 3) / 10
        return 1.0, 36, forwards, 60, forwards / 36

    sample = Sample(measured({"AR": constant(tokens=36, forwards=36), "wedlm": decoder}))
    effect = EntropyEffect(sample, "wedlm", "wedlm")
    checks = effect.checks()
    assert [check.verdict for check in checks] == [verdict] * 2
    assert f"{slow / 4.5:.1f}" in checks[0].evidence or verdict == OPEN
    rows = effect.to_dict()["prompts"]
    assert rows[0]["tokens_per_forward"] > rows[-1]["tokens_per_forward"]


def test_entropy_is_not_compared_over_too_few_prompts():
    sample = Sample(measured({"AR": constant()}, prompts=14))
    assert {check.verdict for check in EntropyEffect(sample, "AR", "AR").checks()} == {MISSING}
    same = Sample(measured({"AR": constant()}, entropies=torch.zeros(PROMPTS, dtype=torch.float64)))
    assert {check.verdict for check in EntropyEffect(same, "AR", "AR").checks()} == {MISSING}


def test_rank_correlation_shares_the_ranks_of_ties():
    first = torch.tensor([1.0, 2.0, 2.0, 9.0], dtype=torch.float64)
    assert spearman(first, first.exp()) == pytest.approx(1)
    assert spearman(first, -first) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 and 2, 1, 3, 4: Pearson's correlation of these.
    assert spearman(first, torch.tensor([2.0, 1.0, 3.0, 4.0], dtype=torch.float64)) == pytest.approx(
        3 / math.sqrt(4.5 * 5)
    )
    assert math.isnan(spearman(first, torch.ones(4, dtype=torch.float64)))


def test_quantiles_of_student_are_those_of_the_tables():
    for probability, freedom, expected in (
        (0.975, 5, 2.571),
        (0.975, 11, 2.201),
        (0.995, 11, 3.106),
        (0.975, 599, 1.964),
    ):
        assert student_quantile(probability, freedom) == pytest.approx(expected, rel=3e-3)
    assert student_quantile(0.975, 0) == float("inf")
