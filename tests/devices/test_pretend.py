"""The pretend accelerator itself: what it refuses, and what it calls a wait."""

import pytest
import torch


@pytest.mark.parametrize(
    "meet",
    [
        lambda ours, cpu: ours + cpu,
        lambda ours, cpu: torch.cat([ours, cpu]),
        lambda ours, cpu: torch.where(ours > 0, ours, cpu),
        lambda ours, cpu: cpu[ours.long()],
        lambda ours, cpu: cpu.add_(ours),
        lambda ours, cpu: torch.nn.functional.embedding(cpu.long(), ours[:, None]),
        lambda ours, cpu: ours.index_put((ours.long(),), cpu),
        lambda ours, cpu: torch.randint(9, (2,), device=ours.device, generator=torch.Generator()),
    ],
)
def test_tensors_of_two_devices_do_not_meet(pretend, meet):
    ours, cpu = torch.zeros(3, device=pretend.device), torch.zeros(3)
    with pytest.raises((RuntimeError, TypeError), match=r"same device|generator"):
        meet(ours, cpu)


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (lambda ours: ours.sum(), 0),
        (lambda ours: ours.__setitem__(ours > 1, 0.0), 0),
        (lambda ours: ours.to(torch.float64).to(ours.device), 0),
        (lambda ours: ours[ours > 1], 1),
        (lambda ours: ours.nonzero(), 1),
        (lambda ours: ours.tolist(), 1),
        (lambda ours: ours.cpu(), 1),
        (lambda ours: torch.zeros(3).copy_(ours), 1),
        (lambda ours: torch.zeros(5)[: ours[1].long()], 1),
    ],
)
def test_what_the_host_reads_is_a_wait(pretend, read, count):
    ours = torch.tensor([1.0, 2.0, 3.0], device=pretend.device)
    read(ours)
    assert len(pretend.waits) == count
